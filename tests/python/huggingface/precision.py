"""Steps of a model in float64, and with each operation's results rounded to float32 at random."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator

import torch
from compare import Step, step
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


def exact_step(model: nn.Module, batch: dict[str, object]) -> Step:
    """Takes the step of a float64 copy of the model, in which the model's own casts to float32 give float64."""
    with _float64():
        return step(_copied(model).double(), tree_map(_widened, batch))


def rounded_step(model: nn.Module, batch: dict[str, object], seed: int) -> Step:
    """Takes the exact step with each operation's result, forward and backward, rounded to float32, randomly up or down.

    This is the least rounding possible in float32: its sums of many terms round more than once.
    """
    with _float64(), _Rounded(seed):
        return step(_copied(model).double(), tree_map(_widened, batch))


def _copied(model: nn.Module) -> nn.Module:
    """Returns a copy. A model's states of its last step belong to a graph, and their copies do not."""
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


def _widened(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.float:
            func = Tensor.double
        elif func is torch._grouped_mm:
            func = _grouped_mm
        args, kwargs = ([_wider(a) for a in args], {key: _wider(a) for key, a in (kwargs or {}).items()})
        if func is Tensor.backward:
            return self._backward(*args)
        return func(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        """Runs the backward pass with the mode on, for the model's own code; any other way re-enters the mode."""
        engine = torch.autograd.Variable._execution_engine
        with self:
            ones = torch.ones_like(loss)
            engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _wider(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def _grouped_mm(input: Tensor, weight: Tensor, *, offs: Tensor, **rest: None) -> Tensor:
    """Multiplies groups of rows that end at ``offs`` with a matrix each; PyTorch has this in float32 only."""
    assert not any(rest.values()) and int(offs[-1]) == len(input)
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return torch.cat([rows @ matrix for rows, matrix in zip(input.split(sizes), weight, strict=True)])


@functools.cache
def _makes_nothing(func: torch._ops.OpOverload) -> bool:
    """Returns whether the operation returns a view or writes in place."""
    return any(result.alias_info is not None for result in func._schema.returns)


class _Rounded(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if _makes_nothing(func):
            return made
        with torch._C.DisableTorchFunction():  # it would turn float32 into float64
            return tree_map(self.rounded, made)

    def rounded(self, value: object) -> object:
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            return value
        nearest = value.float()
        nudge = torch.empty_like(value).uniform_(1 - 2**-24, 1 + 2**-24, generator=self.generator)
        stays = (nearest == value) | nearest.isinf()  # as in masks
        return torch.where(stays, value, (value * nudge).float().double())
