"""Every differentiable call of the package as a function of tensors and leaves, for test_tools.py."""

import dataclasses
from collections.abc import Callable

import logitless
import torch
from support import lce

VOCAB, HIDDEN = 13, 6


class Tensors:
    """The tensors of calls that are not leaves; float32 numbers accompany 16-bit operands."""

    def __init__(self, tokens=9, dtype=torch.float64, device="cpu"):
        generator = torch.Generator().manual_seed(0)
        stats = torch.promote_types(dtype, torch.float32)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        def positive(*shape):
            return (torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.5).to(device, stats)

        self.leaves = [normal(tokens, HIDDEN), normal(VOCAB, HIDDEN), normal(VOCAB)]
        self.numbers = [torch.tensor(number, dtype=stats, device=device) for number in (0.5, 1.25)]
        self.teacher_hidden, self.teacher_weight = normal(tokens, HIDDEN + 3), normal(VOCAB, HIDDEN + 3)
        self.target = torch.randint(0, VOCAB, (tokens,), generator=generator)
        self.target[0] = -100
        self.ids = torch.randint(0, VOCAB, (tokens, 3), generator=generator)
        self.ids[:, 1], self.ids[1, 2], self.ids[0] = self.ids[:, 0], -100, -100
        self.target, self.ids = self.target.to(device), self.ids.to(device)
        self.all_ids, self.few_ids = self.ids.reshape(-1), torch.tensor([7, 2, 2, 12], device=device)
        # Lists of all tokens but one: with one more, their number would equal HIDDEN at one of the lengths compiled.
        self.offsets = torch.tensor([0] * 3 + [5] * (tokens - 4) + [3 * tokens], device=device)
        self.rows, self.classes, self.of_ids = positive(tokens), positive(VOCAB), positive(tokens, 3)
        self.is_counted = torch.arange(tokens, device=device) != 3


@dataclasses.dataclass
class Call:
    """A call function(tensors, *leaves); leaves are input, weight, bias and the learned numbers."""

    function: Callable
    learned: tuple = ()

    def leaves(self, tensors):
        leaves = [*tensors.leaves, *tensors.numbers[: len(self.learned)]]
        return [leaf.detach().clone().requires_grad_() for leaf in leaves]


def options_of(tensors, options):
    """Returns options by name; "@name" refers to one of the tensors."""
    return {n: getattr(tensors, v[1:]) if isinstance(v, str) and v[0] == "@" else v for n, v in options.items()}


def loss(target="target", learned=(), **options):
    def call(tensors, input, weight, bias, *numbers):
        given = options_of(tensors, options) | dict(zip(learned, numbers))
        return lce(input, weight, getattr(tensors, target), bias=bias, **given)

    return Call(call, learned)


def statistic(name):
    def call(tensors, input, weight, bias):
        options = {"bias": bias, "softcap": 3.0, "temperature": 0.7, "return_stats": [name]}
        return getattr(lce(input, weight, tensors.target, **options), name)

    return Call(call)


def log_probs(learned=(), **options):
    def call(tensors, input, weight, bias, *numbers):
        given = options | dict(zip(learned, numbers))
        return logitless.linear_log_probs(input, weight, tensors.ids, bias=bias, **given)

    return Call(call, learned)


def pairs(learned=(), **options):
    def call(tensors, input, weight, bias, *numbers):
        given = options_of(tensors, options) | dict(zip(learned, numbers))
        return logitless.info_nce(input, weight, symmetric=True, **given) + bias.square().sum()

    return Call(call, learned)


def divergence(**options):
    def call(tensors, input, weight, bias):
        given = {"student_bias": bias, "mask": tensors.is_counted, "student_softcap": 3.0, "temperature": 1.2}
        given |= options_of(tensors, options)
        return logitless.linear_divergence(input, weight, tensors.teacher_hidden, tensors.teacher_weight, **given)

    return Call(call)


def candidates(ids, first=0, **options):
    def call(tensors, input, weight, bias):
        given = {"bias": bias, "softcap": 4.0, "return_entropy": True} | options_of(tensors, options)
        out = logitless.linear_candidates(input[first:], weight, getattr(tensors, ids), ignore_id=-100, **given)
        return torch.cat([out.log_probs.masked_fill(out.log_probs.isinf(), 0).reshape(-1), out.entropy])

    return Call(call)


def many_heads(**options):
    """Two heads that share weight and bias, and one without bias."""

    def call(tensors, input, weight, bias):
        weights, targets = [weight, weight, weight * 0.5], tensors.ids.T.contiguous()
        given = {"biases": [bias, bias, None], **options}
        return logitless.multi_head_linear_cross_entropy(input, weights, targets, **given)

    return Call(call)


def module(made, prefix=""):
    def call(tensors, input, weight, bias):
        parameters = {f"{prefix}weight": weight, f"{prefix}bias": bias}
        return torch.func.functional_call(made, parameters, (input, tensors.target))

    return Call(call)


LOSSES = {
    "mean": loss(),
    "sum": loss(reduction="sum", softcap=3.0),
    "none": loss(reduction="none", label_smoothing=0.2),
    "z_loss": loss(z_loss=0.1, scale=0.5),
    "shift": loss(shift=2, class_weight="@classes"),
    "num_items": loss(token_weight="@rows", num_items=4),
    "nll": statistic("nll"),
    "lse": statistic("lse"),
    "entropy": statistic("entropy"),
}
CALLS = LOSSES | {
    "target_logit": statistic("target_logit"),
    "temperatures": loss(temperature="@rows", reduction="none", softcap=2.0),
    "learned scale": loss(learned=("scale",), softcap=2.0, num_items=7),
    "learned scale of none": loss(learned=("scale",), reduction="none", shift=1, class_weight="@classes"),
    "learned temperature": loss(learned=("temperature",), z_loss=0.1),
    "both learned": loss(learned=("scale", "temperature"), reduction="none", label_smoothing=0.2),
    "several targets": loss("ids", target_weight="@of_ids", label_smoothing=0.1),
    "several targets of none": loss("ids", target_weight="@of_ids", reduction="none"),
    "log_probs": log_probs(softcap=5.0),
    "log_probs with a learned scale": log_probs(learned=("scale",), temperature=0.7),
    "pairs": pairs(learned=("scale",), targets="@target", temperature=0.7, label_smoothing=0.1),
    "pairs of none": pairs(reduction="none", targets="@target", token_weight="@rows", softcap=3.0),
    "candidates": candidates("ids", temperature="@rows"),
    "candidates with offsets": candidates("all_ids", first=1, offsets="@offsets"),
    "candidates of the vocabulary": candidates("ids", normalize="vocabulary"),
    "one list of candidates": candidates("few_ids"),
    "divergence": divergence(beta=0.4),
    "forward divergence": divergence(beta=0.0, reduction="none"),
    "reverse divergence": divergence(beta=1.0, teacher_scale=0.5),
    "divergence over lists": divergence(beta=0.4, ids="@ids", ignore_id=-100, mask=None),
    "many heads": many_heads(head_weights=[1.0, 0.3, -2.0], softcap=3.0),
    "module": module(logitless.LinearCrossEntropyLoss(HIDDEN, VOCAB, bias=True), "linear."),
    "head": module(logitless.nn.FusedHead(HIDDEN, VOCAB, True, shift=1)),
}
SPARSIFIED = {
    "sparsified": loss(gradient="always-sparsified", threshold=0.25, seed=4),
    "screened": loss(gradient="always-sparsified", threshold=0.25, seed=4, screen="fp8", learned=("scale",)),
    "sparsified none": loss(gradient="always-sparsified", threshold=0.25, seed=4, reduction="none", learned=("scale",)),
}
