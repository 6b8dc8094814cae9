"""Options that are numbers, given as numbers or as tensors of one element.

The operators take them as a list of floats in the order below, NaN for None, which a compiled graph holds as constants:
a value that changes (a schedule, the items of a batch) would compile anew. Where PyTorch has made one a symbol, or one
is a tensor, a float64 tensor on the CPU takes the list's place there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._options import DEFAULT_THRESHOLD, shape_text

NAMES = ("label_smoothing", "scale", "softcap", "z_loss", "num_items", "temperature", "threshold")
LEARNED = ("scale", "temperature")  # a tensor of one element may have a gradient
_UNUSED = (0.0, 1.0, 0.0, 0.0, None, 1.0)  # of all but the threshold

# The gradient of scale is <input, d_input> / scale: d_input, in float32, must not underflow.
LEAST_LEARNED_SCALE = 2.0**-64


def scalar(name: str, tensor: Tensor, *, learned: bool = False) -> Tensor:
    """The scalar of a tensor of one element, checked; without its gradient unless it is learned."""
    _checks.check_tensor(name, tensor)
    if tensor.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {shape_text(tensor.shape)}")
    if tensor.dtype == torch.bool or tensor.dtype.is_complex:
        raise TypeError(f"{name}: expected a number, got {tensor.dtype}")
    if not learned:
        with_gradients = "input, linear_weight, linear_bias, scale and temperature"
        _checks.check_constant(name, tensor, f"it has no gradient, as {with_gradients} have")
    return tensor.reshape(()) if learned else tensor.detach().reshape(())


def value(name: str, number: Any) -> Any:
    """A number, of a tensor too, which waits for its device. What is being compiled keeps the tensor, but of threshold,
    whose range is checked here."""
    if not isinstance(number, Tensor):
        return number
    found = scalar(name, number, learned=name in LEARNED).detach()
    return found if torch.compiler.is_compiling() and name != "threshold" else found.item()


def _is_static(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, Tensor):
        return False
    from torch.fx.experimental import symbolic_shapes

    known = getattr(symbolic_shapes, "has_static_value", None)
    return known is None or known(value)  # an older PyTorch compiles for each number


def _as_tensor(number: Any) -> Tensor:
    if isinstance(number, Tensor):
        return number.to("cpu", torch.float64)
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return one * (math.nan if number is None else number)  # a product: PyTorch makes an input of a symbol there


def split(options: dict[str, Any], keeps_draws: bool) -> tuple[dict[str, Any], Tensor | None]:
    """The options with their numbers as a list, and ``numbers`` where compiled code must not hold them as constants.

    The size of draws that are kept follows from the threshold, which is a constant there.
    """
    values = [options[name] for name in NAMES]
    others = {name: value for name, value in options.items() if name not in NAMES}
    tensor = None
    if torch.compiler.is_compiling() and not all([_is_static(value) for value in values]):
        tensor = torch.stack([_as_tensor(value) for value in values])
        values = [*_UNUSED, values[-1] if keeps_draws else DEFAULT_THRESHOLD]
    others["numbers"] = [math.nan if value is None else value for value in values]
    return others, tensor


def joined(options: dict[str, Any], tensor: Tensor | None) -> dict[str, Any]:
    """The options with their numbers by name: those of the tensor if there is one."""
    options = dict(options)
    numbers = options.pop("numbers")
    options |= zip(NAMES, numbers if tensor is None else tensor.tolist())
    if math.isnan(options["num_items"]):
        options["num_items"] = None
    return options


def check_learned_scale(scale: float) -> None:
    if not abs(scale) >= LEAST_LEARNED_SCALE:
        raise ValueError(
            "scale: expected a magnitude of at least 2^-64 where its gradient is wanted (which is the product of input "
            f"and its gradient over scale), got {scale}"
        )


def check_learned_temperature(softcap: float) -> None:
    if softcap != 0:
        raise ValueError(
            "temperature: expected one that does not require grad with a softcap (its gradient is made of those of "
            f"input and bias, which is no way past a softcap), got one that does, and softcap {softcap}"
        )


def inner_product(hidden: Tensor, d_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """<hidden, d_hidden> of [N, D], rows by rows, added up in a scalar of float64. dtype: of hidden in the products.

    The gradients of scale and temperature are made of it. Logits depend on scale as on the size of hidden, so that of
    scale is <hidden, d_hidden> / scale. Without a softcap they depend on the inverse of the temperature as on the
    sizes of hidden and bias together, so that of the temperature is -(<hidden, d_hidden> + <bias, d_bias>) / T.
    """
    rows = max(1, (1 << 20) // max(1, hidden.shape[1]))
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        gradient = d_hidden[part]  # 0 in ignored rows, whatever those of hidden hold
        total += torch.where(gradient == 0, 0, hidden[part].to(dtype) * gradient).sum(dtype=torch.float64)
    return total
