"""The arguments of ``logitless.linear_cross_entropy``: checked, and as the tensors and options of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _c, _checks, _dtypes, _numbers, _options
from ._flags import Wants
from ._options import shape_text
from ._torch import CODES, Inputs, stats_dtype

Number = float | Tensor
Seed = int | Tensor | torch.Generator | None


class Arguments(NamedTuple):
    """Tensors and what may be one; then options, which are no tensors once without_number_tensors has been called."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    token_weight: Tensor | None = None
    row_temperature: Tensor | None = None  # a number for each row, in the place of temperature
    target_weight: Tensor | None = None  # of the target's shape, exactly where rows have several targets
    main_grad: Tensor | None = None
    num_items: Number | None = None
    seed: Seed = None
    reduction: str = "mean"
    ignore_index: int | None = -100
    label_smoothing: Number = 0.0
    scale: Number = 1.0
    softcap: Number | None = None
    temperature: Number = 1.0
    z_loss: Number = 0.0
    shift: int = 0
    max_workspace_bytes: int | str | None = None
    return_stats: bool | Sequence[str] = False
    differentiable_stats: bool = False
    gradient: str = "exact"
    threshold: Number = _options.DEFAULT_THRESHOLD
    batch_invariant: bool = False
    compute_dtype: int = _c.F32  # to which products round float32 tensors; of logitless_dtype

    def rows(self) -> torch.Size:
        """The shape of what there is one for each row of."""
        return self.input.shape[:-1]

    def has_several_targets(self) -> bool:
        """Their weights tell it: a target with one dimension too many is a mistake."""
        return self.target_weight is not None and self.target.dim() == self.input.dim()


TENSORS = Arguments._fields.index("num_items")  # those before are tensors or None
FIRST_OPTION = Arguments._fields.index("reduction")


class Learned(NamedTuple):
    """Options that may have a gradient as scalar tensors, None where they are numbers."""

    scale: Tensor | None
    temperature: Tensor | None

    def wanted(self, trained: Wants) -> Learned:
        return Learned(self.scale if trained.scale else None, self.temperature if trained.temperature else None)


def temperatures(temperature: Number, rows: Sequence[int]) -> tuple[Tensor | None, Number]:
    """One for each of these rows, or one for all.

    One of a single row is that row's, so that the row has the bits that it has in a batch; a learned one is of all.
    """
    if not isinstance(temperature, Tensor):
        return None, temperature
    is_rows = temperature.dim() > 0 and temperature.shape == rows and not temperature.requires_grad
    return (temperature, 1.0) if is_rows or temperature.numel() != 1 else (None, temperature)


def autocast(a: Arguments) -> Arguments:
    """The arguments as autocast wants those of F.linear, which are cast unless they are float64.

    Float32 tensors stay as they are: products round them a part at a time, and write float32 gradients at once.
    """
    device, dtypes = a.input.device.type, (a.input.dtype, a.linear_weight.dtype)
    if not torch.is_autocast_enabled(device) or torch.float64 in dtypes:
        return a
    dtype = torch.get_autocast_dtype(device)
    rounds = dtype in (torch.bfloat16, torch.float16) and torch.float32 in dtypes

    def cast(tensor: Tensor) -> Tensor:
        is_cast = tensor.dtype in (torch.bfloat16, torch.float16) or (tensor.dtype == torch.float32 and not rounds)
        return tensor.to(dtype) if is_cast else tensor

    compute_dtype = CODES[dtype] if rounds else _c.F32
    return a._replace(input=cast(a.input), linear_weight=cast(a.linear_weight), compute_dtype=compute_dtype)


def check_seed(seed: Seed, device: torch.device) -> None:
    if isinstance(seed, Tensor):
        _checks.check_tensor("seed", seed)
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(f"seed: expected one int64 element, got {seed.dtype} of shape {shape_text(seed.shape)}")
        _checks.check_devices(device, {"seed": seed})
    elif isinstance(seed, torch.Generator):
        if seed.device.type != device.type:
            raise ValueError(f"seed: expected a generator on {device}, as input is, got one on {seed.device}")
    elif seed is not None:
        _options.checked_seed(seed)


def seed_tensor(seed: Seed, device: torch.device) -> Tensor:
    """A scalar on the device, made outside of the operators: a recomputed forward pass draws the same elements."""
    if isinstance(seed, Tensor):
        return seed.reshape(())
    if seed is None or isinstance(seed, torch.Generator):
        return torch.randint(_options.SEED_RANGE, (), dtype=torch.int64, device=device, generator=seed)
    return torch.full((), seed, dtype=torch.int64, device=device)


def check_head(a: Arguments) -> None:
    """input, linear_weight, linear_bias and target, before they are cast."""
    _checks.check_head(a.input, a.linear_weight, a.linear_bias, a.target, a.has_several_targets())


def check_rest(a: Arguments, rows: Sequence[int] | None = None) -> None:
    """All others but options that are numbers; to be called with cast arguments. rows: the shape of what there is one
    for each row of, where that is not the input's."""
    rows = a.rows() if rows is None else rows
    _dtypes.check_float64(torch.float64, a.input, a.linear_weight, a.linear_bias)
    if a.weight is not None:
        _checks.check_tensor("weight", a.weight)
        _checks.check_real("weight", a.weight)
        _checks.check_shape("weight", a.weight, a.linear_weight.shape[:1], "V")
        _checks.check_constant("weight", a.weight, "class weights have no gradient")
    of_rows = "one for each row" if a.has_several_targets() else "that of target"
    if a.token_weight is not None:
        _checks.check_tensor("token_weight", a.token_weight)
        _checks.check_real("token_weight", a.token_weight)
        _checks.check_shape("token_weight", a.token_weight, rows, of_rows)
        _checks.check_constant("token_weight", a.token_weight, 'use reduction="none" and multiply')
    if a.row_temperature is not None:
        _checks.check_tensor("temperature", a.row_temperature)
        _checks.check_real("temperature", a.row_temperature)
        _checks.check_shape("temperature", a.row_temperature, rows, f"{of_rows}, or one element")
        _checks.check_constant(
            "temperature", a.row_temperature, "of one element it may, of one for each row it is a constant"
        )
    if a.has_several_targets():
        _options.check_several_targets(a.weight, a.gradient)
    if a.target_weight is not None:
        if not a.has_several_targets():
            raise ValueError(
                "target_weight: expected None with one target a row, got a tensor; the target of several has one more "
                "dimension, and token_weight has weights of rows"
            )
        _checks.check_tensor("target_weight", a.target_weight)
        _checks.check_real("target_weight", a.target_weight)
        _checks.check_shape("target_weight", a.target_weight, a.target.shape, "that of target")
        _checks.check_constant("target_weight", a.target_weight, "use logitless.linear_log_probs and multiply")
    if isinstance(a.num_items, Tensor):
        if a.reduction != "mean":
            raise ValueError(f'num_items: expected None unless reduction is "mean", got a tensor with "{a.reduction}"')
        _numbers.scalar("num_items", a.num_items)
    if a.main_grad is not None:
        _checks.check_main_grad(a.main_grad, a.linear_weight, stats_dtype(a.input))
    names = ("linear_weight", "target", "linear_bias", "weight", "token_weight", "target_weight", "main_grad")
    tensors = {name: getattr(a, name) for name in names} | {"temperature": a.row_temperature}
    _checks.check_devices(a.input.device, tensors)
    _options.check_gradient(a.gradient)
    _options.check_seed_is_used(a.seed, a.gradient)
    check_seed(a.seed, a.input.device)


def learned(a: Arguments) -> Learned:
    """Those that are tensors, whose gradients may be wanted."""
    given = {name: getattr(a, name) for name in _numbers.LEARNED}
    return Learned(
        **{n: _numbers.scalar(n, v, learned=True) if isinstance(v, Tensor) else None for n, v in given.items()}
    )


def without_number_tensors(a: Arguments) -> Arguments:
    """Options that are numbers as numbers (where nothing is compiled), which waits for their devices."""
    names = ("label_smoothing", "scale", "softcap", "temperature", "z_loss", "threshold")
    return a._replace(**{name: _numbers.value(name, getattr(a, name)) for name in names})


def options_of(a: Arguments) -> dict[str, Any]:
    """The options, checked, with their numbers by name; num_items None where it is a tensor."""
    shared = (
        "reduction",
        "ignore_index",
        "shift",
        "max_workspace_bytes",
        "gradient",
        "batch_invariant",
        "compute_dtype",
    )
    given = {name: getattr(a, name) for name in (*shared, *_numbers.NAMES)}
    if isinstance(a.num_items, Tensor):
        given["num_items"] = None
    return _options.make_options(**given, sequence_length=a.rows()[-1] if a.input.dim() > 1 else 1)


def inputs_of(a: Arguments, learned: Learned) -> Inputs:
    """The tensors of the problem, without seed and numbers; learned: where gradients are wanted."""
    input, class_weight, token_weight, num_items = a.input, a.weight, a.token_weight, None
    temperature, target_weight = a.row_temperature, None
    if a.target_weight is not None:
        target_weight = a.target_weight.to(stats_dtype(input)).reshape(-1, a.target.shape[-1])
    if class_weight is not None:
        class_weight = class_weight.to(stats_dtype(input))
    if token_weight is not None:
        token_weight = token_weight.to(stats_dtype(input)).reshape(-1)
    if temperature is not None:
        temperature = temperature.to(stats_dtype(input)).reshape(-1)
    if a.num_items is not None and isinstance(a.num_items, Tensor):
        num_items = _numbers.scalar("num_items", a.num_items)
    return Inputs(
        input if input.dim() == 2 else input.reshape(-1, input.shape[-1]),
        a.linear_weight,
        a.target,
        a.linear_bias,
        class_weight,
        token_weight,
        temperature,
        target_weight,
        num_items,
        seed=None,
        scale=learned.scale,
        temperature=learned.temperature,
        numbers=None,
    )
