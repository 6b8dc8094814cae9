"""The place of logits that were not made: in a Trainer's evaluation, and in code that counts places."""

import copy
import pickle

import logitless.transformers
import pytest
import torch
import transformers
from logitless.errors import UnsupportedError
from tiny import build, inputs

pytestmark = pytest.mark.slow

NAMES = [
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",  # the encoder's hidden states follow
    "BartForConditionalGeneration",
    "MixtralForCausalLM",  # the router's logits follow
    "BertForMaskedLM",
    "BertForPreTraining",  # another head's logits follow
]
REFUSED = "evaluate: expected False .*compute_metrics.* got True and .*prediction_loss_only=True"


MADE_ANEW = {
    "accelerate's float32": lambda outputs: fp32(outputs),
    "accelerate's devices": lambda outputs: accelerate_operations().send_to_device(outputs, "cpu"),
    "pytree": lambda outputs: torch.utils._pytree.tree_map(lambda leaf: leaf, outputs),
    "dict": lambda outputs: type(outputs)(dict(outputs)),
    "copy": copy.copy,
    "own copy": lambda outputs: outputs.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda outputs: pickle.loads(pickle.dumps(outputs)),
}


def accelerate_operations():
    return pytest.importorskip("accelerate.utils.operations")


def fp32(outputs):
    return accelerate_operations().convert_to_fp32(outputs)


def tiny(name):
    model = build(name)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    return model.eval()


def trainer(model, folder, dictionary=True, **options):
    pytest.importorskip("accelerate")
    batch = inputs(model)
    model.config.return_dict = dictionary
    data = [{key: value[index % 2] for key, value in batch.items()} for index in range(6)]
    precision = {"bf16": options.pop("bf16", False)}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, **precision
    )
    return transformers.Trainer(model=model, args=arguments, eval_dataset=data, **options)


@pytest.mark.parametrize(
    ("dictionary", "bf16"), [(True, False), (False, False), (True, True)], ids=["outputs", "tuple", "autocast"]
)
@pytest.mark.parametrize("name", NAMES)
def test_metrics_get_logits_or_an_error_that_says_what_to_do(name, dictionary, bf16, tmp_path):
    if not dictionary and name in ("LlamaForCausalLM", "BartForConditionalGeneration", "MixtralForCausalLM"):
        pytest.skip("the class itself fails with return_dict=False in its configuration")
    model, seen = tiny(name), []

    def compute_metrics(prediction):
        seen.append(prediction.predictions)
        return {}

    def evaluate(model, **options):
        return trainer(model, tmp_path, dictionary, bf16=bf16, **options).evaluate()["eval_loss"]

    stock = evaluate(copy.deepcopy(model), compute_metrics=compute_metrics)
    evaluate(logitless.transformers.patch(copy.deepcopy(model)), compute_metrics=compute_metrics)
    first, second = (p[0] if isinstance(p, tuple) else p for p in seen)
    assert (first == second).all()

    logitless.transformers.patch(model, evaluate=True)
    with pytest.raises(UnsupportedError, match=REFUSED):
        evaluate(model, compute_metrics=compute_metrics)
    assert len(seen) == 2
    assert abs(evaluate(model) - stock) <= (2**-8 if bf16 else 1e-6) * stock


def test_predictions_are_refused_and_may_be_left_out(llama, tmp_path):
    made = trainer(logitless.transformers.patch(llama, evaluate=True), tmp_path)
    with pytest.raises(UnsupportedError, match=REFUSED):
        made.predict(made.eval_dataset)
    assert made.predict(made.eval_dataset, ignore_keys=["logits"]).metrics["test_loss"] > 0


COPIED = ["LlamaForCausalLM", "T5ForConditionalGeneration", "BertForPreTraining"]


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("name", "how"), [(name, "itself") for name in NAMES] + [(name, how) for name in COPIED for how in MADE_ANEW]
)
def test_everything_else_is_where_it_was(name, how, gradients):
    """This holds for outputs that are rebuilt, as by accelerate's mixed precision and DistributedDataParallel."""
    if how in ("deepcopy", "pickle") and not gradients:
        pytest.skip("a copy of the values is a use of them")
    model, anew = tiny(name), MADE_ANEW.get(how, lambda outputs: outputs)
    batch = inputs(model)
    with torch.set_grad_enabled(gradients):
        stock, stock_tuple = model(**batch), model(**batch, return_dict=False)
        logitless.transformers.patch(model, evaluate=True)
        made, fused = model(**batch), model(**batch, return_dict=False)
    (place,) = {key for key in made if getattr(made, key) is None}
    assert place.endswith("logits") and len(fused) == len(stock_tuple)
    if how in ("deepcopy", "pickle"):  # these leave it alone
        for outputs in (stock, made):
            for key, value in outputs.items():
                if isinstance(value, torch.Tensor):
                    outputs[key] = value.detach()
    for _ in range(2):
        made = anew(made)
    assert isinstance(made, type(stock)) and type(made).__name__ == type(stock).__name__
    assert list(made) == list(stock) and len(made.to_tuple()) == len(stock.to_tuple())
    assert getattr(made, place) is None and (made[place] is None) == gradients
    for index, (key, value) in enumerate(stock.items()):
        assert made[index] is made[key]
        if key != place:
            torch.testing.assert_close(made[key], value, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(fused[index], stock_tuple[index], atol=1e-5, rtol=1e-5)
    made[place] = made.loss
    assert getattr(anew(made), place) is not None  # a tensor that other code has put there


def data_parallel_keeps_all_places(mesh, options):
    model = tiny("T5ForConditionalGeneration").bfloat16()
    batch = inputs(model)
    stock = model(**batch)
    wrapped = torch.nn.parallel.DistributedDataParallel(logitless.transformers.patch(model), **options)
    for _ in range(2):
        made = fp32(wrapped(**batch))
        assert list(made) == list(stock) and made.logits is None and made[1] is None
        made.loss.backward()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_data_parallel_training_keeps_all_places(options, ranks_of):
    # A process of its own keeps the group: if Python frees it with the wrapper, gloo's threads may wait for ever.
    ranks_of(1)(data_parallel_keeps_all_places, options)


@pytest.mark.parametrize(
    "use",
    [
        lambda z: z.float().argmax(-1),
        lambda z: z.cpu().numpy(),
        lambda z: z.tolist(),
        lambda z: z[0],
        lambda z: z == 1,
        lambda z: bool(z),
        lambda z: torch.cat([z, z]),
        lambda z: torch.zeros(z.shape).copy_(z),
        lambda z: copy.deepcopy(z),
        lambda z: torch.from_dlpack(z),
    ],
)
def test_any_use_of_the_values_is_refused(llama, use):
    logitless.transformers.patch(llama, evaluate=True)
    with torch.no_grad():
        logits = llama(**inputs(llama))["logits"]
    assert (
        logits.to("cpu").detach().shape == (2, 8, 99) and logits.dtype == torch.float32 and "NoLogits" in repr(logits)
    )
    with pytest.raises(UnsupportedError, match=REFUSED):
        use(logits)


def test_a_compiled_model_is_evaluated(llama):
    batch = inputs(llama)
    compiled = torch.compile(logitless.transformers.patch(llama, evaluate=True), backend="eager")
    with torch.no_grad():
        made = compiled(**batch)
        assert made.loss > 0
        with pytest.raises(UnsupportedError, match=REFUSED):
            made["logits"].argmax(-1)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_a_patched_model_is_exported_with_labels(name, strict):
    """It is exported as without the patch: the program needs none of our operators."""
    model = tiny(name)
    batch = inputs(model)
    stock = model(**batch)
    logitless.transformers.patch(model, evaluate=True)
    made = torch.export.export(model, (), batch, strict=strict).module()(**batch)
    assert list(made) == list(stock)
    torch.testing.assert_close(made["loss"], stock.loss)
    torch.testing.assert_close(made["logits"], stock.logits)
    assert model(**batch).logits is None
