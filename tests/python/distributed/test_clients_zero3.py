"""ZeRO-3 gathers the head's weight for its forward call, frees it, and gathers it again in the backward pass.

Stage `newest` of ./scripts/test has DeepSpeed. Without it these tests are skipped.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import logitless.transformers
import pytest
import torch
from client_models import Model, alone, batch
from client_oracle import excess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "huggingface"))

needs_deepspeed = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.slow,
]
pytestmark = needs_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
FREED = {  # nothing stays gathered
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
KEPT = {"stage": 3}  # DeepSpeed's defaults keep what is used again soon


def start(mesh):
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(mesh.get_rank()), "LOCAL_RANK": str(mesh.get_rank())}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def engine_of(mesh, model, micro=1, zero=FREED):
    config = CONFIG | {"gradient_accumulation_steps": micro, "zero_optimization": zero}
    return start(mesh).initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def steps(mesh, head, reduction, bias, tied, micro):
    from deepspeed.utils import safe_get_full_grad

    by_head = {}
    for made in ("stock", head):
        model = Model(made, reduction, tied, bias)
        engine = engine_of(mesh, model, micro)
        sizes = []
        for step in range(2):
            for part in range(micro):
                loss = engine(*batch(mesh.get_rank(), micro * step + part)).mean()
                sizes.append(model.lm_head.weight.numel())  # between forward and backward
                engine.backward(loss)
                gradients = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
                engine.step()
        by_head[made] = gradients, sizes, float(loss)
    return by_head["stock"], by_head[head]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("bias", "tied", "micro"), [(False, False, 1), (True, False, 2), (False, True, 1)])
def test_a_head_whose_weight_is_gathered_twice(two, reduction, bias, tied, micro):
    """With "mean" gradients come with the loss. With "none" the backward pass regathers the weight."""
    true = alone(2, micro=micro, reduction=reduction, tied=tied, bias=bias, divisor=2 * micro)
    for stock, fused in two(steps, "module", reduction, bias, tied, micro):
        assert set(fused[1]) == {0}, "the weight was not freed"
        assert fused[2] == pytest.approx(stock[2], rel=1e-6)
        for name, gradient in true.items():
            assert excess(fused[0][name], stock[0][name], gradient) <= 1, name


def outside(mesh):
    model = Model("outside")
    engine = engine_of(mesh, model)
    ids, labels = batch(mesh.get_rank(), 0)
    hidden = engine(ids, labels)
    try:
        model.loss(hidden, labels)
    except ValueError as error:
        return str(error)
    return ""


def test_a_weight_that_is_read_outside_its_module_is_refused(two):
    for message in two(outside):
        assert message.startswith("weight: expected shape [V, D], got [0]")


@contextlib.contextmanager
def counted():
    """Counts the collectives that gather parameters."""
    import deepspeed.comm

    gathers, own = [], deepspeed.comm.allgather_fn

    def gather(*args, **kwargs):
        gathers.append(args)
        return own(*args, **kwargs)

    deepspeed.comm.allgather_fn = gather
    try:
        yield gathers
    finally:
        deepspeed.comm.allgather_fn = own


def gradients_of(model):
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}


def run(mesh, model, loss_of, micro=1, zero=FREED):
    """Returns gradients of the second of two steps, with the weight's sizes and the number of gathers up to each point.

    The first step's update is of no size, so that both are those of the given weights.
    """
    engine = engine_of(mesh, model, micro, zero)
    engine.optimizer.set_lr(0.0)
    head, seen = model.get_output_embeddings().weight, []
    with counted() as gathers:
        for _ in range(2):
            for part in range(micro):
                loss = loss_of(engine, part)
                seen.append((head.numel(), len(gathers)))
                engine.backward(loss)
                seen.append((head.numel(), len(gathers)))
            gradients = gradients_of(model)
            engine.step()
    return gradients, seen


def language_model(case):
    transformers = pytest.importorskip("transformers")
    from test_clients_transformers import model_of
    from tiny import build

    kinds = {"bias": transformers.GPTJForCausalLM, "in a module": transformers.BertForMaskedLM}
    kinds |= {"in a tuple": transformers.BertForPreTraining}
    model = build(kinds[case]) if case in kinds else model_of(case == "tied")
    if case.startswith("in a"):  # gradients of these are 0 but for rounding
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("key.bias"))
    if case == "frozen":
        model.get_output_embeddings().requires_grad_(False)
    if case == "LoRA":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        )
    if case.startswith("checkpointing"):
        model.gradient_checkpointing_enable(dict(use_reentrant=case.endswith("reentrant")))
    return model


def batch_of(rank, part, case):
    """Returns a batch. Rank 1 may have no token in the loss, or no labels."""
    from tiny import inputs

    made = inputs(language_model("plain"))
    made["labels"] = made["labels"].roll((rank, part), (0, 1))
    if case == "in a tuple":
        made["next_sentence_label"] = torch.tensor([0, 1])
    if rank and case == "all ignored":
        made["labels"] = torch.full_like(made["labels"], -100)
    return made


def loss_of(model, rank, part, case):
    given = batch_of(rank, part, case)
    if rank and case == "no labels":
        del given["labels"]
        return model(**given).logits.square().mean()
    return model(**given, num_items_in_batch=torch.tensor(7)).loss


def patched(mesh, case, micro, zero):
    results = []
    for fused in (False, True):
        model = language_model(case)
        if fused:
            logitless.transformers.patch(model)
        results.append(run(mesh, model, lambda engine, part: loss_of(engine, mesh.get_rank(), part, case), micro, zero))
    return results


def exactly(model, loss_of, case, micro=1):
    """Returns gradients of the mean of all ranks' losses in float64."""
    model.double()
    for rank in range(2):
        for part in range(micro):
            (loss_of(model, rank, part, case) / (2 * micro)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(by_rank, true):
    """Compares gradients by name, and when the head's weight was whole and gathered."""
    for (stock, of_stock), (fused, of_fused) in by_rank:
        assert of_fused == of_stock
        assert fused.keys() == true.keys()
        for name, gradient in true.items():
            assert excess(fused[name], stock[name], gradient) <= 1, name


CASES = ["plain", "tied", "bias", "in a module", "in a tuple", "frozen", "LoRA", "all ignored", "no labels"]
CASES += ["checkpointing", "checkpointing, reentrant"]


@pytest.mark.parametrize(("zero", "micro"), [(FREED, 1), (KEPT, 2)], ids=["freed", "kept"])
@pytest.mark.parametrize("case", CASES)
def test_a_patched_model(two, case, zero, micro):
    by_rank = two(patched, case, micro, zero)
    if zero is FREED:
        assert {size for size, _ in by_rank[0][1][1]} == {0}, "the weight was not freed"
    check(by_rank, exactly(language_model(case), loss_of, case, micro))


def evaluated(mesh):
    losses = []
    for fused in (False, True):
        model = language_model("plain")
        if fused:
            logitless.transformers.patch(model, evaluate=True)
        engine = engine_of(mesh, model)
        engine.eval()
        with torch.no_grad():
            outputs = engine(**batch_of(mesh.get_rank(), 0, "plain"))
        losses.append(outputs.loss)
    assert outputs.logits is None
    return losses


def test_evaluation(two):
    for stock, fused in two(evaluated):
        torch.testing.assert_close(fused, stock)


def not_gathered(mesh):
    deepspeed = start(mesh)
    model = logitless.transformers.patch(language_model("plain"))
    deepspeed.zero.Init(module=model.lm_head, config_dict_or_path=CONFIG | {"zero_optimization": FREED})
    try:
        model(**batch_of(mesh.get_rank(), 0, "plain"))
    except NotImplementedError as error:
        return str(error)
    return ""


def test_a_head_that_nothing_gathers_is_refused(two):
    for message in two(not_gathered):
        assert "partitioned by DeepSpeed ZeRO-3, and nothing has gathered it" in message
