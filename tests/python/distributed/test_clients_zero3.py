"""ZeRO-3 gathers the head's weight for its forward call, frees it, and gathers it again in the backward pass.

Stage `newest` of ./scripts/test has DeepSpeed. Without it these tests are skipped.
"""

import importlib.util
import os

import pytest
from client_models import Model, alone, batch
from client_oracle import excess

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.slow,
]

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {  # nothing stays gathered
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    },
}


def engine_of(mesh, model, micro=1):
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(mesh.get_rank()), "LOCAL_RANK": str(mesh.get_rank())}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
    deepspeed.init_distributed(dist_backend="gloo")
    config = CONFIG | {"gradient_accumulation_steps": micro}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


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
