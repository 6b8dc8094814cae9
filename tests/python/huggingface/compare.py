"""Compares loss and gradients of a model, unpatched and patched, with those in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import logitless.transformers
import numpy
import torch
from logitless.transformers._logits import Logits
from tiny import VOCAB, inputs
from torch import Tensor, nn

TERMS = VOCAB  # terms of the head's longest sum, at least as long as any other here


class Step(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    outputs: object = None

    def tensors(self) -> dict[str, Tensor]:
        """Returns everything to compare."""
        return {"loss": self.loss, **{name: g for name, g in self.gradients.items() if g.numel() > 0}}


def step(model: nn.Module, batch: dict[str, object]) -> Step:
    """Takes one training step without the update, with the same random numbers each time.

    Returns loss, gradients by name, and outputs.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    numpy.random.seed(2)
    outputs = model(**batch)
    outputs.loss.backward()
    gradients = {
        name.removeprefix("_orig_mod."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    return Step(outputs.loss.detach(), gradients, outputs)


def check_patched(model: nn.Module, batch: dict[str, object] | None = None) -> Reference:
    """Checks that the patched model has the unpatched model's loss and gradients."""
    batch = batch or inputs(model)
    reference = Reference.of(model, batch)
    assert reference.share_of(logitless.transformers.patch(model), batch) <= 1
    return reference


def check_16_bits(fused: Step, stock: Step, exact: Step) -> None:
    """Checks that a step in 16 bits is as close to float64 as the stock model's; both have the trunk's own rounding."""
    assert bool(torch.isfinite(fused.loss)) and distance(fused.loss, exact.loss) <= (
        2 * distance(stock.loss, exact.loss) + 2**-8
    )
    for name, gradient in exact.gradients.items():
        error, bound = (distance(step.gradients[name], gradient) for step in (fused, stock))
        assert error <= 2 * bound + 2**-7 * float(gradient.abs().max()), name


def make_wrong(monkeypatch, by: float = 1.01, name: str = "scaled") -> None:  # type: ignore[no-untyped-def]
    """Makes a factor of the logits, or a bias ("with_bias"), wrong by a factor from now on."""
    right = getattr(Logits, name)
    monkeypatch.setattr(Logits, name, lambda self, value: right(self, by * value))


def distance(first: Tensor, second: Tensor) -> float:
    """Returns the largest difference of two elements; infinite if one is NaN."""
    largest = float((first.double() - second.double()).abs().max())
    return largest if largest == largest else float("inf")


def difference(first: Step, second: Step) -> float:
    """Returns the largest difference of loss and gradients, each in units of its largest element.

    A gradient may be negligible beside the largest one, such as that of a bias which the softmax cancels. Its unit is
    then a thousandth of the largest. This describes; :class:`Reference` decides.
    """
    ours, theirs = first.tensors(), second.tensors()
    if ours.keys() != theirs.keys():
        return float("inf")
    least = 1e-3 * max([float(a.abs().max()) for name, a in ours.items() if name != "loss"], default=0.0)
    errors = {name: distance(a, theirs[name]) for name, a in ours.items()}
    return max([e / max(float(ours[name].abs().max()), least) for name, e in errors.items() if e != 0], default=0.0)


@dataclass(frozen=True)
class Reference:
    """A model's loss and gradients, and the error that rounding alone causes.

    A tensor's error is its largest distance from float64. In float32 a tensor of the patched model may have twice the
    error of the model's own plus a unit of rounding. One rounding is the largest error of some steps in float64 whose
    operations round their results to float32 once. It is at least that of the tensor's largest element. The unit is
    sqrt(n) of them: sums of n terms, which form the head and its gradients, round n times, and n independent roundings
    add up to sqrt(n) of one (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).

    The patched model also runs in float64, where all of this is smaller by 2^-29, the ratio of the two precisions.
    There the reference has an error itself, so three times the error of the model's own is allowed.
    """

    stock: Step
    exact: Step
    rounded: tuple[Step, ...]

    @classmethod
    def of(cls, model: nn.Module, batch: dict[str, object]) -> Reference:
        """Makes the reference of a float32 model that is not patched."""
        from precision import exact_step, rounded_step

        rounded = tuple(rounded_step(model, batch, seed) for seed in range(2))
        made = cls(step(model, batch), exact_step(model, batch), rounded)
        bad = [name for name, error in made.allowed(torch.float32).items() if not math.isfinite(error)]
        if bad:
            raise ArithmeticError(f"no finite bound of {', '.join(bad)}")
        return made

    def allowed(self, dtype: torch.dtype) -> dict[str, float]:
        """Returns the allowed error of a tensor in this dtype."""
        errors, sizes = self._errors(self.stock), self._sizes()
        samples = [self._errors(step) for step in self.rounded]
        bounds = {}
        for name, error in errors.items():
            rounding = max(sizes[name] * 2**-24, *(sample[name] for sample in samples))
            unit = TERMS**0.5 * rounding
            bounds[name] = (3 * error + unit) * 2**-29 if dtype == torch.float64 else 2 * error + unit
        return bounds

    def share(self, step: Step) -> float:
        """Returns the largest error of this step's tensors over the allowed one; above 1 it is wrong."""
        if step.gradients.keys() != self.exact.gradients.keys():
            return float("inf")
        dtypes = {gradient.dtype for gradient in step.gradients.values()}
        assert len(dtypes) == 1, dtypes
        allowed, errors = self.allowed(dtypes.pop()), self._errors(step)
        return max(
            (e / allowed[name] if allowed[name] else float("inf") for name, e in errors.items() if e), default=0.0
        )

    def share_of(self, model: nn.Module, batch: dict[str, object]) -> float:
        """Returns the larger share of the patched model's steps in float64 and float32, each with its self-check."""
        from precision import exact_step

        return max(self.share(exact_step(model, batch)), self.share(step(model, batch)))

    def unseen(self, dtype: torch.dtype, part: float = 1e-3) -> list[str]:
        """Returns the tensors in which an error of this part of the largest element would be allowed.

        Tensors that are 0 but for rounding are left out: their largest element is less than the allowed error.
        """
        sizes = self._sizes()
        return [name for name, error in self.allowed(dtype).items() if part * sizes[name] <= error < sizes[name]]

    def _sizes(self) -> dict[str, float]:
        return {name: float(tensor.abs().max()) for name, tensor in self.exact.tensors().items()}

    def _errors(self, step: Step) -> dict[str, float]:
        tensors = step.tensors()
        return {name: distance(tensors[name], exact) for name, exact in self.exact.tensors().items()}
