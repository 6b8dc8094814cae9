"""Options have one description, and calls one path."""

import inspect
import itertools

import logitless
import logitless.numpy
import pytest
import torch
from logitless import call, functional, inspection, native, nn
from logitless import options as schema

UNPACK = {
    functional.linear_cross_entropy: schema.HeadOptions,
    functional.linear_log_probs: schema.IdOptions,
    functional.linear_top_k: schema.TopKOptions,
    logitless.linear_candidates: logitless.candidates.CandidateOptions,
    logitless.distributed.linear_candidates: logitless.candidates.CandidateOptions,
    logitless.linear_divergence: schema.Budget,
    logitless.distributed.linear_cross_entropy: schema.HeadOptions,
    logitless.distributed.linear_log_probs: schema.IdOptions,
    logitless.numpy.linear_cross_entropy: logitless.numpy.LossOptions,
    logitless.numpy.linear_log_probs: logitless.numpy.IdOptions,
    logitless.numpy.linear_top_k: logitless.numpy.TopKOptions,
    inspection.plan: inspection.PlanOptions,
    inspection.plans: inspection.PlanOptions,
    logitless.multi_head_linear_cross_entropy: schema.TrainingOptions,
    nn.AdaptiveLogSoftmaxWithLoss.__init__: schema.TrainingOptions,
    nn.FusedHead.__init__: schema.LossOptions,
    nn.MultiHeadLoss.__init__: schema.TrainingOptions,
    nn.LinearCrossEntropyLoss.__init__: schema.LossOptions,
}


def shown(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize("function", UNPACK, ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_signatures_show_every_option(function):
    parameters = shown(function)
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    assert set(UNPACK[function].__annotations__) <= set(parameters)
    of_module = {"ignore_index"} if function is nn.LinearCrossEntropyLoss.__init__ else set()
    for name in (set(parameters) & set(schema.DEFAULTS)) - of_module:
        if name != "bias" or parameters[name].default is None:  # a switch of plans and modules
            assert parameters[name].default == schema.DEFAULTS[name], name


def test_the_docstring_names_every_option():
    text = functional.linear_cross_entropy.__doc__
    for name in shown(functional.linear_cross_entropy):
        assert f"\n        {name}: " in text, name


def test_arguments_have_the_defaults_of_the_schema():
    defaults = call.Arguments._field_defaults
    assert set(schema.HeadOptions.__annotations__) <= set(defaults)
    for name in set(defaults) & set(schema.DEFAULTS):
        assert defaults[name] == schema.DEFAULTS[name], name


def test_defaults_and_ranges_are_the_librarys():
    """None stands for the library's default of an option."""
    known = native.schema().options
    for name in schema.HEAD_OPTIONS & known.keys():
        given = schema.make_options(schema.DEFAULTS, 1).get(name)
        value = known[name]["values"].index(given) if isinstance(given, str) else given or 0
        assert value == known[name]["default"], name
    assert list(schema.REDUCTIONS) == known["reduction"]["values"]
    assert list(schema.GRADIENTS) == known["gradient"]["values"]
    assert list(schema.SCREENS) == known["screen"]["values"]
    assert known["compute_dtype"]["values"].index("fp8") == schema.FP8
    assert schema.LEAST_THRESHOLD == known["threshold"]["lowest"]
    assert schema.MOST_TOP_K == known["top_k"]["highest"] and schema.MOST_TARGETS == known["targets_per_row"]["highest"]


def test_an_unknown_option_is_refused_by_name():
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(3, dtype=torch.int64)
    calls = {
        "linear_cross_entropy": lambda **o: logitless.linear_cross_entropy(x, w, y, **o),
        "linear_log_probs": lambda **o: logitless.linear_log_probs(x, w, y[:, None], **o),
        "linear_top_k": lambda **o: logitless.linear_top_k(x, w, 2, **o),
        "linear_candidates": lambda **o: logitless.linear_candidates(x, w, y[:, None], **o),
        "linear_divergence": lambda **o: logitless.linear_divergence(x, w, x, w, **o),
        "plan": lambda **o: logitless.plan(3, 5, 4, **o),
        "FusedHead": lambda **o: nn.FusedHead(4, 5, **o),
        "LinearCrossEntropyLoss": lambda **o: nn.LinearCrossEntropyLoss(4, 5, **o),
    }
    for (name, function), unknown in itertools.product(calls.items(), ("row_temperature", "softcapp")):
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '{unknown}'$"):
            function(**{unknown: None})
