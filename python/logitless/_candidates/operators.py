"""Logits at lists of columns of each row, as operators of PyTorch over include/logitless/candidates.h.

``torch.ops.logitless.candidate_logits`` has hidden states ``[N, D]``, the weight ``[V, D]`` and the ids of all lists as
one vector ``[E]``, with ``offsets [N + 1]`` unless all lists are of one length. Losses over the logits are PyTorch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from .. import native
from .. import options as _options
from .._divergence.passes import unit_of
from ..autograd import refuse_double_backward
from ..errors import InvalidTargetError
from ..native import NAMESPACE
from ..run import CODES, DTYPES, row_stride, rows, stats_dtype, stream_of

LOGITS, GRADIENT = range(2)
_operators = getattr(torch.ops, NAMESPACE)


class Candidates(ctypes.Structure):
    """logitless_candidates"""

    _fields_ = native._fields(
        f"""int32 stage, hidden_dtype, weight_dtype, bias_dtype, id_dtype, compute_dtype;
        int64 rows, hidden_size, vocab, elements; double {", ".join(_options.LOGIT_NUMBERS)};
        int64 ignore_id, max_workspace_bytes; pointer hidden; int64 hidden_stride; pointer weight; int64 weight_stride;
        pointer bias, row_temperature, ids, offsets, logits, invalid_ids, grad;
        pointer d_hidden; int64 d_hidden_stride; pointer d_weight; int64 d_weight_stride; pointer d_bias;
        int32 d_hidden_dtype, d_weight_dtype, d_bias_dtype, accumulate_d_weight"""
    )


def _given(fields: Mapping[str, Any]) -> Candidates:
    """Returns the struct with these fields. A tensor is a pointer, and may also set its stride and dtype."""
    given = Candidates(accumulate_d_weight=0)
    for name, value in fields.items():
        if not isinstance(value, Tensor):
            setattr(given, name, value)
            continue
        setattr(given, name, value.data_ptr() or None)
        if hasattr(Candidates, f"{name}_stride"):
            setattr(given, f"{name}_stride", row_stride(value))
        if hasattr(Candidates, f"{name}_dtype"):
            setattr(given, f"{name}_dtype", CODES[value.dtype])
    return given


def _context(device: torch.device) -> Any:
    on_host = device.type == "cpu"
    return native._context(torch.get_num_threads() if on_host else 1, None, native.HOST if on_host else device.index)


def _workspace_bytes(device: torch.device, given: Candidates) -> int:
    context, size = _context(device), ctypes.c_size_t()
    function = native.library().logitless_candidates_workspace_bytes
    native.check(function(context.pointer, ctypes.byref(given), ctypes.byref(size)))
    return size.value


def _run(device: torch.device, **fields: Any) -> None:
    """Runs a stage. fields: as _given() takes them."""
    context, given = _context(device), _given(fields)
    workspace = torch.empty(_workspace_bytes(device, given), dtype=torch.uint8, device=device)
    stream = None if device.type == "cpu" else stream_of(device.index)
    native.check(
        native.library().logitless_candidates_run(
            context.pointer, ctypes.byref(given), workspace.data_ptr() or None, workspace.numel(), stream
        )
    )


class ListArguments(NamedTuple):
    """The arguments of both operators that say what lists there are and how logits are made, as in _SCHEMA."""

    ids: Tensor
    offsets: Tensor | None
    row_temperature: Tensor | None
    numbers: list[float]  # LOGIT_NUMBERS
    ignore_id: int
    compute_dtype: int
    max_workspace_bytes: int

    def fields(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """Returns the fields of both stages."""
        ids = self.ids.contiguous()
        return {
            "hidden": rows(hidden),
            "weight": rows(weight),
            "ids": ids,
            "id_dtype": CODES[ids.dtype],
            "offsets": _in_order(self.offsets),
            "row_temperature": _in_order(self.row_temperature),
            "rows": hidden.shape[0],
            "hidden_size": hidden.shape[1],
            "vocab": weight.shape[0],
            "elements": ids.shape[0],
            **dict(zip(_options.LOGIT_NUMBERS, self.numbers)),
            "ignore_id": self.ignore_id,
            "compute_dtype": self.compute_dtype,
            "max_workspace_bytes": self.max_workspace_bytes,
        }


def _in_order(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


_SCHEMA = (
    "Tensor ids, Tensor? offsets, Tensor? row_temperature, float[] numbers, int ignore_id, int compute_dtype, "
    "int max_workspace_bytes"
)


@torch.library.custom_op(
    f"{NAMESPACE}::candidate_logits",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor? bias, {_SCHEMA}) -> Tensor",
)
def candidate_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, *lists: Any) -> Tensor:
    of = ListArguments(*lists)
    out = torch.empty(of.ids.shape[0], dtype=stats_dtype(hidden), device=hidden.device)
    _run(hidden.device, stage=LOGITS, logits=out, bias=_in_order(bias), **of.fields(hidden, weight))
    return out


@candidate_logits.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *rest: Any) -> Tensor:
    return hidden.new_empty(ids.shape, dtype=stats_dtype(hidden))


@torch.library.custom_op(
    f"{NAMESPACE}::candidate_gradients",
    mutates_args=(),
    schema="(Tensor grad, Tensor? logits, Tensor hidden, Tensor weight, int bias_dtype, bool d_hidden, "
    f"SymInt d_weight, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def candidate_gradients(
    grad: Tensor,
    logits: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias_dtype: int,
    d_hidden: bool,
    d_weight: int,
    *lists: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of hidden states, weight and bias; empty ones where they are not wanted.

    bias_dtype: the bias' logitless_dtype, or -1 for no gradient. d_weight: rows of the weight's gradient, 0 for none;
    ids are below it, and it is V with d_hidden or bias_dtype.
    """
    fields = ListArguments(*lists).fields(hidden, weight)
    outputs = _gradients(hidden, weight, bias_dtype, d_hidden, d_weight)
    wanted = dict(zip(("d_hidden", "d_weight", "d_bias"), outputs))
    fields |= {name: output for name, output in wanted.items() if output.numel() > 0}
    if d_weight > 0 and not d_hidden and bias_dtype < 0:  # ids number the rows of this gradient
        fields["vocab"] = d_weight
    _run(hidden.device, stage=GRADIENT, grad=grad.contiguous(), logits=_in_order(logits), **fields)
    return outputs


def _gradients(
    hidden: Tensor, weight: Tensor, bias_dtype: int, d_hidden: bool, d_weight: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if d_hidden else (0,)),
        weight.new_empty((d_weight, weight.shape[1]) if d_weight > 0 else (0,)),
        weight.new_empty(weight.shape[0], dtype=DTYPES[bias_dtype]) if bias_dtype >= 0 else weight.new_empty((0,)),
    )


@candidate_gradients.register_fake
def _(grad: Tensor, logits: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(*rest[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, bias, *lists = inputs
    of = ListArguments(*lists)
    ctx.options, ctx.bias_dtype = of[3:], -1 if bias is None else CODES[bias.dtype]
    has_softcap = of.numbers[_options.LOGIT_NUMBERS.index("softcap")] != 0
    ctx.save_for_backward(hidden, weight, output if has_softcap else None, *of[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward("linear_candidates")
    hidden, weight, logits, *lists = ctx.saved_tensors
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    gradients = _operators.candidate_gradients.default(
        grad,
        logits,
        hidden,
        weight,
        ctx.bias_dtype if wants_bias else -1,
        wants_hidden,
        weight.shape[0] if wants_weight else 0,
        *lists,
        *ctx.options,
    )
    wanted = [gradient if on else None for gradient, on in zip(gradients, ctx.needs_input_grad[:3])]
    return (*wanted, *[None] * 7)


candidate_logits.register_autograd(_backward, setup_context=_save)


class SparseWeight(torch.autograd.Function):
    """candidate_logits with a sparse gradient of the weight, as nn.Embedding(sparse=True) has."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output: Tensor = _operators.candidate_logits.default(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wants = ctx.needs_input_grad
        ctx = _Wanting(ctx, (wants[0], False, wants[2]))
        gradients: list[Tensor | None] = [None] * 10
        if wants[0] or wants[2]:
            gradients = list(_backward(ctx, grad))
        if wants[1]:
            gradients[1] = _sparse_d_weight(ctx, grad)
        return tuple(gradients)


class _Wanting:
    """A context of autograd that wants other gradients."""

    def __init__(self, ctx: Any, wants: tuple[bool, ...]) -> None:
        self.saved_tensors, self.options, self.bias_dtype = ctx.saved_tensors, ctx.options, ctx.bias_dtype
        self.needs_input_grad = wants


def _sparse_d_weight(ctx: Any, grad: Tensor) -> Tensor:
    hidden, weight, logits, *lists = ctx.saved_tensors
    of = ListArguments(*lists, *ctx.options)
    is_element = (of.ids != of.ignore_id) & (of.ids >= 0) & (of.ids < weight.shape[0])
    kept, places = torch.unique(of.ids[is_element], return_inverse=True)
    numbered = torch.full_like(of.ids, -1, dtype=torch.int64).masked_scatter_(is_element, places)
    count = kept.shape[0]
    values = weight.new_empty((0, weight.shape[1]))
    if count > 0:
        values = _operators.candidate_gradients.default(
            grad, logits, hidden, weight, -1, False, count, *of._replace(ids=numbered, ignore_id=-1)
        )[1]
    size = weight.shape
    return torch.sparse_coo_tensor(kept[None].long(), values, size, is_coalesced=True, check_invariants=False)


def check_budget(hidden: Tensor, weight: Tensor, bias: Tensor | None, lists: ListArguments, sparse: bool) -> None:
    """Raises BudgetTooSmallError unless the budget is enough for the logits, and for gradients that come later."""
    has_values = not torch.compiler.is_compiling() and not isinstance(hidden, FakeTensor)
    if lists.max_workspace_bytes in (0, _options.FASTEST) or not has_values:
        return
    shared = lists._replace(ids=lists.ids.reshape(-1)).fields(hidden, weight)
    operands = {"hidden": shared["hidden"], "weight": shared["weight"], "bias": _in_order(bias)}
    # Only whether a gradient is wanted counts, not where it is.
    wanted = {
        f"d_{name}": operands[name]
        for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias))
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
    }
    passes: list[dict[str, Any]] = [{"stage": LOGITS, "bias": operands["bias"]}]
    if sparse and "d_weight" in wanted:  # which is a pass over at most these columns
        columns = min(shared["vocab"], shared["elements"])
        passes.append({"stage": GRADIENT, "d_weight": wanted.pop("d_weight"), "vocab": columns})
    if wanted:
        passes.append({"stage": GRADIENT, **wanted})
    structs = [_given(shared | fields) for fields in passes]
    native.enough(*(functools.partial(_workspace_bytes, hidden.device, given) for given in structs))


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, lists: ListArguments, sparse: bool) -> Tensor:
    """Returns the logits of all lists, ``[E]``. sparse: whether the weight's gradient has only the rows that occur."""
    arguments = (hidden, weight, bias, *lists._replace(ids=lists.ids.reshape(-1)))
    check_budget(hidden, weight, bias, lists, sparse)
    try:
        if sparse and torch.is_grad_enabled() and weight.requires_grad:
            result: Tensor = SparseWeight.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            result = _operators.candidate_logits.default(*arguments)
    except InvalidTargetError as error:
        raise _options.named_target(error, lists.ids.shape, "ids") from None
    return result


# ---- one list for all rows: a product with the gathered rows of the weight


def _product(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """Returns a @ b with sums and results of the dtype ``out``: float32, or float64 for such operands."""
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == out or not a.is_cuda:
            return a.to(out) @ b.to(out)
        return torch.mm(a, b, out_dtype=out)


@torch.library.custom_op(
    f"{NAMESPACE}::dense_logits", mutates_args=(), schema="(Tensor hidden, Tensor weight, ScalarType dtype) -> Tensor"
)
def dense_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns hidden @ weight.T in float32 (float64), with operands rounded to a dtype."""
    return _product(hidden.to(dtype), weight.to(dtype).T, stats_dtype(hidden))


@dense_logits.register_fake
def _(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=stats_dtype(hidden))


def _save_dense(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, ctx.dtype = inputs
    ctx.save_for_backward(hidden, weight)


def _dense_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    refuse_double_backward("linear_candidates")
    hidden, weight = ctx.saved_tensors
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    d_hidden, d_weight = _operators.dense_gradients.default(grad, hidden, weight, ctx.dtype, wants_hidden, wants_weight)
    return d_hidden if wants_hidden else None, d_weight if wants_weight else None, None


@torch.library.custom_op(
    f"{NAMESPACE}::dense_gradients",
    mutates_args=(),
    schema="(Tensor grad, Tensor hidden, Tensor weight, ScalarType dtype, bool d_hidden, bool d_weight) -> "
    "(Tensor, Tensor)",
)
def dense_gradients(
    grad: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype, d_hidden: bool, d_weight: bool
) -> tuple[Tensor, Tensor]:
    """Returns gradients of hidden states and weight, empty where they are not wanted. They are rounded once.

    In float16 small gradients of logits would be lost, so they are multiplied by a power of two before.
    """
    unit = unit_of(dtype, grad)
    dz = (grad if unit is None else grad * unit).to(dtype)

    def made(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
        product = _product(a, b.to(dtype), grad.dtype)
        return (product if unit is None else product / unit).to(like.dtype)

    return (
        made(dz, weight, hidden) if d_hidden else hidden.new_empty((0,)),
        made(dz.T, hidden, weight) if d_weight else weight.new_empty((0,)),
    )


@dense_gradients.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype, d_hidden: bool, d_weight: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden) if d_hidden else hidden.new_empty((0,)), (
        torch.empty_like(weight) if d_weight else weight.new_empty((0,))
    )


dense_logits.register_autograd(_dense_backward, setup_context=_save_dense)


def shared_logits(hidden: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype, sparse: bool) -> Tensor:
    """Returns products of all rows ``[N, D]`` with one list's columns ``[K]``.

    Products of ids out of range are those of another column. PyTorch adds the gradients of equal ids in their order.
    """
    places = ids.long().clamp(0, weight.shape[0] - 1)
    gathered = torch.nn.functional.embedding(places, weight, sparse=sparse)
    products: Tensor = _operators.dense_logits.default(hidden, gathered, dtype)
    return products


# ---- FLOP


@register_flop_formula(_operators.candidate_logits)
def _(hidden: Any, weight: Any, bias: Any, ids: Any, *_: Any, **__: Any) -> int:
    return 2 * int(ids[0]) * int(hidden[1])


@register_flop_formula(_operators.candidate_gradients)
def _(
    grad: Any,
    logits: Any,
    hidden: Any,
    weight: Any,
    bias_dtype: int,
    d_hidden: bool,
    d_weight: int,
    ids: Any,
    *_: Any,
    **__: Any,
) -> int:
    return (int(d_hidden) + int(d_weight > 0)) * 2 * int(ids[0]) * int(hidden[1])


@register_flop_formula(_operators.dense_gradients)
def _(grad: Any, hidden: Any, weight: Any, dtype: Any, d_hidden: bool, d_weight: bool, *_: Any, **__: Any) -> int:
    return (int(d_hidden) + int(d_weight)) * 2 * int(hidden[0]) * int(hidden[1]) * int(weight[0])


@register_flop_formula(_operators.dense_logits)
def _(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * int(hidden[0]) * int(hidden[1]) * int(weight[0])
