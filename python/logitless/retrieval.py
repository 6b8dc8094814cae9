"""``logitless.info_nce``: the loss of retrieval and contrastive models, where the other side's rows are the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import call
from . import options as _options
from .call import Number
from .functional import linear_cross_entropy
from .options import InfoNCEOptions, accepts, shape_text
from .run import stats_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["info_nce"]

OPTIONS = _options.names_of(InfoNCEOptions)
NONE: int = _options.target_of_none(None)  # the target of rows without a pair, where the caller names none


@accepts(InfoNCEOptions)
def info_nce(
    a: Tensor,
    b: Tensor,
    temperature: Number = 1.0,
    *,
    symmetric: bool = False,
    targets: Tensor | None = None,
    **options: Unpack[InfoNCEOptions],
) -> Tensor:
    """Computes the InfoNCE loss of pairs without the matrix of similarities ``a @ b.T``.

    Row i of ``a`` belongs to row i of ``b``, or to row ``targets[i]``. All other rows of ``b`` are its negatives::

        z_ij   = (scale * (a_i . b_j) + bias_j) / temperature
        loss_i = -log softmax(z_i)[targets[i]]

    With ``symmetric`` the loss is half of that plus half of the loss with both sides exchanged, as CLIP has it: the row
    of ``b`` is then classified among all rows of ``a``. Rows that are to be compared by their angle are normalized by
    the caller, whose gradient then includes the norm's.

    One direction is :func:`logitless.linear_cross_entropy` with ``b`` as the weight, in cost, dtypes, autocast and
    rounding. Both directions are two such calls, one after the other, each within the budget. The second is ``[N, N]``.

    Args:
        a: ``[N, D]``, in float32, bfloat16, float16 or float64: images, queries or users.
        b: ``[M, D]``: texts, documents or items. Rows beyond the first N are further negatives.
        temperature: A number > 0, or a tensor of one element, which is learned if it requires grad. In one direction
            it may be a constant for each row of ``a``.
        symmetric: Whether both directions are counted.
        targets: The row of ``b`` of each row of ``a``, int64 or int32, ``[N]``; rows with ``ignore_index`` have no
            pair. None means row i for row i, which needs M >= N. With ``symmetric`` each pair is classified in both
            directions. So two rows of ``a`` with one target are negatives of each other there, and a row without a
            pair is still a negative.
        bias: Added to the logits of each row of ``b``, ``[M]``: minus the logarithm of its frequency, for example. Only
            in one direction.
        reduction: ``"mean"`` over pairs, ``"sum"`` or ``"none"``, which gives ``[N]``.
        ignore_index: The target of rows without a pair. It is not used without ``targets``.
        scale: Factor of the products, a number or a tensor, which is learned as there: CLIP's ``logit_scale.exp()``.
        seed: Seed of sparsified gradients, for both directions.

    The other options are those of :func:`logitless.linear_cross_entropy`, for each direction. Weights of rows are those
    of pairs.

    Returns:
        The loss in float32 (float64 for float64 inputs).

    Raises:
        TypeError: An argument has the wrong type, dtype or layout. A QuantizedWeight is not supported.
        ValueError: An argument has the wrong shape, device or range.
        InvalidTargetError: A target is outside ``[0, M)`` on the CPU. On CUDA the loss is NaN.
        BudgetTooSmallError, NotImplementedError: As in :func:`logitless.linear_cross_entropy`.
    """
    given = checked(a, b, temperature, symmetric, targets, options)
    if b is a:
        b = b.view_as(b)  # compiled code refuses a tensor that is given twice
    rows = torch.arange(a.shape[0], device=a.device)
    loss = _one_direction(a, b, rows if targets is None else targets, temperature, given)
    if not symmetric:
        return loss
    if targets is None:
        of_pairs = b if b.shape[0] == a.shape[0] else b[: a.shape[0]]
    else:
        # The gradient of an embedding adds up rows in one order, unlike that of an index; of 16-bit rows in 16 bits.
        wide = b.to(stats_dtype(b))
        of_pairs = torch.nn.functional.embedding(targets.clamp(0, b.shape[0] - 1), wide).to(b.dtype)
        rows = rows.where(targets != given["ignore_index"], NONE)
    return (loss + _one_direction(of_pairs, a, rows, temperature, given | {"ignore_index": NONE})) / 2


def _one_direction(a: Tensor, b: Tensor, targets: Tensor, temperature: Number, given: Mapping[str, Any]) -> Tensor:
    loss: Any = linear_cross_entropy(a, b, targets, temperature=temperature, **given)
    made: Tensor = loss
    return made


def checked(
    a: Tensor,
    b: Tensor,
    temperature: Number,
    symmetric: bool,
    targets: Tensor | None,
    options: Mapping[str, Any],
    in_group: bool = False,
) -> dict[str, Any]:
    """Checks the arguments by the caller's names, and returns the options of one direction.

    in_group: whether a and b are a rank's rows, of any number, and targets are rows of all ranks' b.
    """
    _options.check_names("info_nce", options, OPTIONS)
    _options.flag("symmetric", symmetric)
    bias, weights = options.get("bias"), options.get("token_weight")
    if weights is not None:
        call.check_tensor("token_weight", weights)
    for name, tensor, shape in (("a", a, "[N, D]"), ("b", b, "[M, D]")):
        call.check_tensor(name, tensor)
        if tensor.dim() != 2:
            raise ValueError(f"{name}: expected shape {shape}, got {shape_text(tensor.shape)}")
    matrices = {"a": a, "b": b, "bias": bias}
    call.check_matrices(matrices, 0 if in_group else 1)
    _options.check_float64(torch.float64, matrices, "of a, b and bias")
    rows = a.shape[0]
    if targets is not None:
        call.check_tensor("targets", targets)
        call.check_integers("targets", targets)
        call.check_shape("targets", targets, (rows,), "one for each row of a")
    elif b.shape[0] < rows:
        raise ValueError(f"b: expected at least {rows} rows, one for each of a, or targets, got {b.shape[0]}")
    call.check_devices(a.device, matrices | {"targets": targets, "token_weight": weights}, "a")
    if symmetric and bias is not None:
        raise ValueError("bias: expected None with symmetric (it belongs to rows of b alone), got a tensor")
    if symmetric and rows == 0 and not in_group:
        raise ValueError(f"a: expected rows with symmetric, got shape {shape_text(a.shape)}")
    if (symmetric or in_group) and isinstance(temperature, Tensor) and temperature.numel() != 1:
        where = "in a group of ranks" if in_group else "with symmetric"
        raise ValueError(f"temperature: expected one element {where}, got shape {shape_text(temperature.shape)}")
    ignored = NONE if targets is None else _options.target_of_none(options.get("ignore_index"))
    return {**options, "ignore_index": ignored}
