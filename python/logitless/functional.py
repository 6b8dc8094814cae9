"""``logitless.linear_cross_entropy``, ``linear_log_probs`` and ``linear_top_k`` for PyTorch tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import options as _options
from .call import (
    Arguments,
    Prepared,
    can_run_eagerly,
    check_tensor,
    has_dtensor,
    inputs_of,
    key_of,
    prepare,
    with_row_temperature,
)
from .errors import BudgetTooSmallError, InvalidTargetError, UnsupportedError
from .inspection import plan
from .options import HeadOptions, IdOptions, TopKOptions, Wants, accepts, shape_text
from .outputs import LinearCrossEntropyOutput, LinearTopK, known, log_probs, loss, result_of, top_k, top_k_of
from .passes import PassKey, spec_of
from .quantized import BYTES, PIECE, QuantizedWeight, Saved, made_again
from .run import plan_on, stats_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LinearCrossEntropyOutput",
    "LinearTopK",
    "check_targets",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_top_k",
    "warm_up",
]


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[HeadOptions],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    return_stats: Literal[True] | Sequence[str],
    **options: Unpack[HeadOptions],
) -> LinearCrossEntropyOutput: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    return_stats: bool | Sequence[str],
    **options: Unpack[HeadOptions],
) -> Tensor | LinearCrossEntropyOutput: ...


@accepts(HeadOptions)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    return_stats: bool | Sequence[str] = False,
    **options: Unpack[HeadOptions],
) -> Tensor | LinearCrossEntropyOutput:
    """Computes the cross entropy of ``softmax(hidden @ weight.T)`` and its gradients without holding the logits.

    The tensors of the call are ``hidden`` (E), ``weight`` (C) and ``targets`` (y). With w the class weights (1 without
    them) and T the temperature, row i has::

        z_ij   = t(scale * (E_i . C_j) + bias_j) / T_i,   t = identity, or softcap * tanh(. / softcap)
        lse_i  = log sum_j exp z_ij,  nll_i = lse_i - z_iy,  entropy_i = lse_i - sum_j p_ij z_ij
        loss_i = token_weight_i * ((1 - label_smoothing) * w_y * nll_i
                 + label_smoothing / V * sum_j w_j (lse_i - z_ij) + z_loss * lse_i ** 2)

    With ``scale = 1`` and without softcap, temperature, z_loss and token weights this is
    ``F.cross_entropy(F.linear(hidden, weight, bias), targets, ...)``.

    A row may have several targets y_k with weights q_k: soft labels, the largest probabilities of a teacher, or several
    right classes. Then ``nll_i = sum_k q_k (lse_i - z_iy_k)``, and ``target_logit`` is ``sum_k q_k z_iy_k``::

        logitless.linear_cross_entropy(hidden, lm_head.weight, teacher_ids, target_weight=teacher_probs)  # [..., K]

    ``label_smoothing``, ``scale``, ``softcap``, ``temperature``, ``z_loss`` and ``threshold`` are numbers or tensors of
    one element. Reading such a tensor waits for its device once a call, so keep it on the CPU where that matters. Only
    ``scale`` and ``temperature`` have a gradient. Compiled code serves all values of a number that changes, except of a
    threshold where drawn elements are kept.

    Args:
        hidden: Hidden states, ``[..., D]``, in float32, bfloat16, float16 or float64. With float64 everything is
            float64, as gradcheck needs it: correct and slow. Rows may have any stride. They are copied unless the last
            dimension is contiguous.
        weight: The head's weight, ``[V, D]``, in any of these dtypes. It may differ from the dtype of ``hidden``, but
            all are float64 or none is. A :class:`logitless.QuantizedWeight` takes its place for a frozen quantised
            head, without statistics, several targets a row, sparsified gradients and ``batch_invariant``.
        targets: Class indices, int64 or int32, of shape ``hidden.shape[:-1]``. With ``target_weight`` the shape is
            ``[..., K]`` with K <= 64 targets a row. Among these, ``ignore_index`` stands for no target, and a row is
            ignored if all of its targets are. Probabilities of all V classes are not supported.
        bias: Added to the logits, ``[V]``.
        class_weight: A weight for each class, ``[V]``. Not supported with several targets a row.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The mean divides by ``num_items``, or without it by the sum
            of ``token_weight_i * w_y`` over valid rows. It is NaN without a valid row.
        ignore_index: Rows with this target have no loss and no gradient. None means -100.
        label_smoothing: A number in [0, 1].
        scale: Factor of the logits before bias and softcap. A tensor that requires grad is learned: its magnitude must
            be at least 2^-64, and its gradient needs a float32 ``d_hidden`` beside the workspace.
        softcap: Bound of the logits. None or 0 means no bound.
        temperature: Divisor of the logits after the softcap. The loss and all statistics are of the divided logits. It
            is a number > 0, or a tensor of one element, which is learned as ``scale`` is (only without a softcap). A
            tensor of the target's shape has one constant for each row (row s predicts ``targets[s + shift]``). A row
            whose own temperature is outside [2^-126, 2^126] is NaN in loss, statistics and gradient unless it is
            ignored.
        z_loss: Factor of ``lse ** 2`` in the loss.
        token_weight: A weight for each row, of the target's shape. Row s is the one that *predicts*
            ``targets[s + shift]``.
        target_weight: Weights of several targets a row, of the target's shape. Any finite numbers will do; they need
            not sum to 1, and the mean does not divide by them. They are constants: :func:`linear_log_probs` returns
            values through which they can get a gradient. Not supported with sparsified gradients.
        num_items: Divisor of the mean, a number or a tensor of one element, which is read on its device. With 0 the
            loss is infinite or NaN, as in PyTorch.
        shift: Position s of the last target dimension predicts ``targets[..., s + shift]``. ``hidden`` is not copied.
        max_workspace_bytes: Hard bound of the memory beyond inputs, outputs and gradients, for each pass, in bytes or
            as a size such as ``"256MiB"``. ``"fastest"`` takes the fastest plan, whatever it needs. None takes the
            smallest plan predicted within 3% of the fastest. It takes at most a quarter of the float32 logits + 64 MiB
            while that costs at most 6%.
        main_grad: A float32 buffer, ``[V, D]``. The backward pass adds the gradient of ``weight`` to it, and autograd
            sees none. In eager mode it does so only where that gradient is requested
            (``torch.autograd.grad(loss, hidden)`` does not); compiled code always does. It is used only if ``weight``
            requires grad. It must share no memory with the other tensors of the call. Several calls may share it, or
            parts of it.
        return_stats: True for ``nll, lse, entropy, argmax, correct_count, valid_count``, or a list of names. Names may
            also be ``target_logit, mean_logit, log_sum_sq_probs, is_top1, max_logit``, and with sparsified gradients
            ``kept_count`` and ``draw_variance``. A ``screen`` has ``loss_error``, and no statistics of the whole row:
            ``entropy, argmax, correct_count, mean_logit, log_sum_sq_probs, is_top1, max_logit``.
        differentiable_stats: False detaches the statistics, which saves the recomputation described below.
        gradient: ``"exact"``, ``"sparsified"`` or ``"always-sparsified"``. Sparsified gradients are unbiased. They use
            at most about 1 / threshold elements of a row's softmax (docs/sparsified.md). On CUDA ``"sparsified"`` is
            exact where sparsifying a flat softmax of these sizes would be slower, as for a small vocabulary;
            ``"always-sparsified"`` never is. The loss is exact without a ``screen``.
        threshold: Threshold of sparsified gradients, in [2^-126, 1]. Softmax elements of at least this size, and the
            target's, are kept as they are. Smaller ones are drawn at random.
        seed: Seed of sparsified gradients; equal seeds give equal bits. It is an integer, a tensor of one int64
            element or a generator of the hidden states' device. A tensor is read on its device, so a CUDA graph may
            change it. None draws a seed from the device's default generator, so ``torch.manual_seed`` makes training
            repeatable.
        screen: ``"fp8"`` chooses the elements of sparsified gradients by 8-bit logits, which saves time on Hopper GPUs.
            The product over the whole vocabulary is of e4m3 numbers, with one power of two for each row. Kept elements
            are evaluated from the tensors as they are. Gradients stay unbiased up to the ratio of two estimates. The
            loss is an estimate, with the standard error ``loss_error``; a loss without gradients is the same one.
            A :class:`logitless.ScreenedWeight` of the weight does so too, and keeps the weight's 8-bit copy for further
            calls. ``max_workspace_bytes`` limits the copy together with the workspace. ``torch.compile`` does not
            support it; other modes and transforms of PyTorch leave it unused.
            Gradients come with the loss, so they are not supported with reduction "none", ``main_grad``,
            differentiable statistics and float16 tensors. Label smoothing, ranks that share a head and float64 are not
            supported either.
        compute_dtype: ``"fp8"`` makes logits of rows of hidden and weight that are rounded to e4m3, with one power of
            two for each row. On Hopper GPUs that product takes about half of the time. Loss, statistics and softmax are
            those of the rounded head. Products of gradients take the tensors as they are, float32 and float16 ones
            rounded to bfloat16 (docs/numerics.md). Not supported with sparsified gradients, several targets a row and
            float64. None: as autocast says.
        batch_invariant: True gives a row's loss, ``nll``, ``lse`` and ``entropy`` the same bits in every batch: however
            many other rows there are, wherever they stand, with and without gradients, under any budget. On the CPU
            this always holds. The gradient of ``hidden`` is not covered (docs/numerics.md). Not supported with
            sparsified gradients.
        recompute_logits: Whether gradients that come later compute the logits again. If not, a call on CUDA keeps what
            they need of them from the forward to the backward pass, as far as ``max_workspace_bytes`` allows: about
            2 V bytes a row with 16-bit operands, and 4 V with float32 ones.

    Returns:
        The loss in float32 (float64 for float64 inputs), also under autocast. It is a scalar, or has the target's shape
            with reduction "none". With ``return_stats`` the result is a :class:`LinearCrossEntropyOutput`. DTensors
            give DTensors, replicated or sharded as the hidden states' tokens are. A weight sharded by FSDP2 with plain
            hidden states gives plain tensors (docs/distributed.md).

    Raises:
        TypeError: An argument has the wrong type, dtype or layout, or DTensors are among plain tensors. The message
            then says what to pass instead.
        ValueError: An argument has the wrong shape, device or range.
        InvalidTargetError: A target is outside ``[0, V)`` on the CPU. On CUDA, which nothing waits for, its loss is NaN
            and its gradient 0; see :func:`check_targets`.
        BudgetTooSmallError: No plan fits ``max_workspace_bytes``. Its ``required_bytes`` is the smallest that works.
        NotImplementedError: Double backward, forward-mode differentiation or a transform of torch.func. A batch of
            upstream gradients, ``torch.autograd.grad(..., is_grads_batched=True)``, is supported: the library computes
            one after the other.

    The work is counted in products of hidden and weight. A loss without gradients takes 1. With gradients it takes 3,
    all in the forward pass (reduction "mean" and "sum"). It takes 4 where the upstream gradients must be known first:
    with reduction "none", ``main_grad``, differentiable statistics, and float16 gradients, which would underflow before
    a loss scale is applied. Sparsified gradients take less than half the time of exact ones on a trained head
    (docs/results.md). Where upstream gradients come later, their drawn elements are kept.

    ``kept_count`` and ``draw_variance`` describe the gradient of the loss. They are free where the forward pass
    computes gradients. Elsewhere, including calls without gradients, they need a draw of their own at the cost of a
    second forward pass.

    Under autocast the products round float32 hidden and weight a part at a time, without copies, and write float32
    gradients directly. Other dtypes are cast as for ``F.linear``. On CUDA float32 products use TF32 where PyTorch
    permits it (``torch.backends.cuda.matmul``).
    """
    given = {"return_stats": return_stats, **options}
    key = key_of("linear_cross_entropy", (hidden, weight, targets), given, may_train=False, is_flat=True)
    again = known(key)
    if again is not None:
        outputs = again.run((hidden, weight, targets, options.get("bias")))
        return result_of(again.prepared, outputs, again.rows)
    _options.check_names("linear_cross_entropy", options, _options.HEAD_OPTIONS)
    if isinstance(weight, QuantizedWeight):
        return _of_quantized(hidden, weight, targets, return_stats=return_stats, **options)
    a = Arguments(hidden, weight, targets, return_stats=return_stats, **options)
    if isinstance(a.temperature, Tensor):
        a = with_row_temperature(a, getattr(hidden, "shape", ())[:-1])
    plain = can_run_eagerly(a)
    if not plain and has_dtensor(a):
        from .distributed import _dtensor

        of_dtensors: Tensor | LinearCrossEntropyOutput = _dtensor.linear_cross_entropy(a)
        return of_dtensors
    return loss(a, plain, key)


@accepts(IdOptions)
def linear_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, **options: Unpack[IdOptions]) -> Tensor:
    """Computes the log-probabilities of ids under ``softmax(hidden @ weight.T)`` without holding the logits.

    The logits are those of :func:`linear_cross_entropy`, and the options have the same meanings. The work, in products
    of hidden and weight, is 1, and in the backward pass 2, or 3 where the logits are computed again.

    Args:
        hidden: Hidden states, ``[..., D]``.
        weight: The head's weight, ``[V, D]``.
        ids: Ids, int64 or int32, ``[..., K]`` with K <= 64. An id may occur several times in a row.
        bias: Added to the logits, ``[V]``.
        scale: As in :func:`linear_cross_entropy`.
        softcap: As in :func:`linear_cross_entropy`.
        temperature: As in :func:`linear_cross_entropy`. A tensor with one for each row has the shape
            ``hidden.shape[:-1]``.
        ignore_index: An id that stands for none. Its log-probability is 0 and has no gradient. A row with such ids
            alone costs nothing. None means -100.
        max_workspace_bytes: As in :func:`linear_cross_entropy`.
        batch_invariant: As in :func:`linear_cross_entropy`.
        recompute_logits: As in :func:`linear_cross_entropy`.

    Returns:
        The log-probabilities, ``[..., K]``, in float32 (float64 for float64 inputs). They are differentiable with
            respect to hidden, weight, bias, and a learned scale or temperature.

    Raises:
        TypeError, ValueError, BudgetTooSmallError, NotImplementedError: As in :func:`linear_cross_entropy`.
        InvalidTargetError: An id is outside ``[0, V)`` on the CPU. On CUDA its row's log-probabilities are NaN, and the
            row has no gradient.
    """
    _options.check_names("linear_log_probs", options, _options.ID_OPTIONS)
    return log_probs(Arguments(hidden, weight, ids, reduction="sum", **options))


@accepts(TopKOptions)
def linear_top_k(hidden: Tensor, weight: Tensor, k: int, **options: Unpack[TopKOptions]) -> LinearTopK:
    """Computes the k largest logits of each row of ``hidden @ weight.T`` without holding all of them.

    The logits are those of :func:`linear_cross_entropy`, and the options have the same meanings. A column's
    log-probability is its logit minus the lse of its row.

    Args:
        hidden: Hidden states, ``[..., D]``.
        weight: The head's weight, ``[V, D]``.
        k: The number of logits, from 1 to the smaller of 64 and V.
        bias: Added to the logits, ``[V]``.
        scale: As in :func:`linear_cross_entropy`, without a gradient.
        softcap: As in :func:`linear_cross_entropy`.
        temperature: A number, or a tensor of one element or of shape ``hidden.shape[:-1]``, without a gradient.
        max_workspace_bytes: As in :func:`linear_cross_entropy`.

    Returns:
        ``ids`` and ``log_probs``, ``[..., k]``, in descending order of the logits. Equal logits come in the order of
            their ids. A NaN comes before all numbers, so the first id is the argmax. They have no gradient.

    Raises:
        TypeError, ValueError, BudgetTooSmallError: As in :func:`linear_cross_entropy`.
    """
    key = key_of("linear_top_k", (hidden, weight), {"k": k, **options}, is_flat=True)
    again = known(key)
    if again is not None:
        targets = torch.zeros(again.rows, dtype=torch.int64, device=hidden.device)
        return top_k_of(again.run((hidden, weight, targets, options.get("bias"))), again.rows, k)
    _options.check_names("linear_top_k", options, _options.TOP_K_OPTIONS)
    return top_k(Arguments(hidden, weight, hidden, reduction="sum", **options), k, key)


def check_targets(targets: Tensor, vocab: int, *, ignore_index: int = -100) -> None:
    """Raises for the first target outside ``[0, vocab)`` that is not ``ignore_index``. Waits for a CUDA device.

    Args:
        targets: Class indices of any shape.
        vocab: V, the number of classes.
        ignore_index: The target of rows that are left out.

    Raises:
        InvalidTargetError: A target is out of range; the message has its place and value.
    """
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InvalidTargetError(
            f"targets: expected 0 <= target < {vocab} or ignore_index {ignore_index}, "
            f"got {int(targets[place])} at targets{shape_text(place)}"
        )


def warm_up(device: torch.device | str | int | None = None) -> None:
    """Prepares what the library and CUDA prepare at first use, so that a CUDA graph may capture the first run.

    Later runs do only their own work. The first run on a device also opens cuBLASLt and creates its handle, which
    allocates memory of the device. CUDA loads each kernel at its first call. This function runs small problems of each
    dtype and kind of gradient, and waits for the device. cuBLASLt looks up a product of a new shape at its first run,
    which a capture allows.

    Args:
        device: A CUDA device, or the CPU, where there is little to prepare. None means PyTorch's current CUDA device,
            or the CPU where there is none.

    Raises:
        ValueError: The device is of another kind.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected the CPU or a CUDA device, got {place}")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(place.type, enabled=False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            with contextlib.suppress(UnsupportedError):  # a chosen engine may lack a dtype
                _warm(place, dtype)
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _warm(device: torch.device, dtype: torch.dtype) -> None:
    hidden, weight = (torch.zeros(n, 64, dtype=dtype, device=device, requires_grad=True) for n in (256, 1024))
    targets = torch.zeros(256, dtype=torch.int64, device=device)
    sparsifies = dtype != torch.float64 or device.type == "cpu"
    for gradient, seed in (("exact", None), ("always-sparsified", 0))[: 1 + sparsifies]:
        for reduction in ("mean", "none"):
            loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, gradient=gradient, seed=seed)
            torch.autograd.grad(loss.sum(), (hidden, weight))


# ---- quantised weights


class _Cut:
    """How many rows of hidden and of the weight a call of the library gets, and the budget that is left for it."""

    def __init__(self, tokens: int, weight: QuantizedWeight, dtype: torch.dtype, device: str, a: Arguments) -> None:
        vocab, width = weight.shape
        self.tokens, self.vocab, self.left = tokens, vocab, a.max_workspace_bytes
        self.piece = PIECE
        budget = _options.budget(self.left)
        if budget == _options.FASTEST or tokens == 0:
            return
        trains = any(part.requires_grad for part in weight.columns)
        row = width * dtype.itemsize * (1 + trains)  # bytes of a dequantised row, and of its gradient
        if budget == 0:
            if vocab * row <= 2 * tokens * vocab:  # half of the float32 logits; the library's default comes on top
                return
            budget = tokens * vocab + (64 << 20) + weight.bytes_beside
        gradients = ("hidden", *["weight"] * trains, *["bias"] * (a.bias is not None and a.bias.requires_grad))
        names = {"dtype": dtype, "gradients": gradients, "bias": a.bias is not None, "device": device}
        least = next(bytes for bytes in _from(budget) if self._fits(tokens, weight, row, bytes, names))
        if least > budget and a.max_workspace_bytes is not None:
            raise BudgetTooSmallError(
                f"max_workspace_bytes: expected at least {least} bytes for {tokens} rows and this quantised head, got "
                f"{budget}",
                least,
            )

    def _fits(self, tokens: int, weight: QuantizedWeight, row: int, budget: int, names: dict[str, Any]) -> bool:
        """Whether there is a plan within the budget, which decides all attributes."""
        vocab, width = weight.shape
        self.piece = min(PIECE, budget // (16 * BYTES))
        beside = weight.bytes_beside + BYTES * max(self.piece, weight.unit * width)
        self.tokens, self.vocab, self.left = tokens, vocab, budget - beside - vocab * row
        if self.left >= budget // 4 and self._has_plan(weight, names):
            return True
        # A half is for the window, a quarter for float32 hidden states and their gradients, and for all statistics.
        self.vocab, self.left = min(vocab, (budget // 2 - beside) // row), budget // 4
        if self.vocab < 1:
            return False
        self.tokens = max(0, min(tokens, (budget // 4 - 24 * tokens * -(-vocab // self.vocab)) // (16 * width)))
        while self.tokens and not self._has_plan(weight, names):
            self.tokens //= 2
        return self.tokens > 0

    def _has_plan(self, weight: QuantizedWeight, names: dict[str, Any]) -> bool:
        with contextlib.suppress(BudgetTooSmallError):
            sizes = self.tokens, self.vocab, weight.shape[1]
            return all(plan(*sizes, max_workspace_bytes=self.left, later=later, **names) for later in (False, True))
        return False


def _from(budget: int) -> Iterator[int]:
    """Yields the budget, and larger ones, which do not depend on it: quarters of powers of two."""
    yield budget
    power = 1 << 16
    while True:
        yield from (power * quarters // 4 for quarters in range(4, 8) if power * quarters // 4 > budget)
        power *= 2


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_quantized(hidden: Tensor, weight: QuantizedWeight, targets: Tensor, **given: Any) -> Tensor:
    """Computes linear_cross_entropy() with these options, of a quantised weight."""
    for name in ("target_weight", "main_grad", "batch_invariant", "return_stats", "gradient", "compute_dtype"):
        value = given.get(name)
        if isinstance(value, Tensor) or value not in (None, False, "exact"):
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedError(f"{name}: expected its default with a QuantizedWeight, got {got}")
    check_tensor("hidden", hidden)
    dtype, hidden = weight.dtype_for(hidden), weight.rounded(hidden)
    # Arguments are checked as those of a weight that is a tensor.
    like = torch.empty(1, 1, dtype=dtype, device=weight.device).expand(weight.shape)
    a = Arguments(hidden, like, targets, **given)
    prepared = prepare(with_row_temperature(a, hidden.shape[:-1]))
    tokens = targets.numel()
    cut = _Cut(tokens, weight, dtype, hidden.device.type, a)
    if (cut.tokens, cut.vocab) != (tokens, weight.shape[0]):
        return _of_windows(prepared, weight, dtype, cut)
    dequantise = functools.partial(weight.rows, 0, cut.vocab, dtype, cut.piece)
    whole = dequantise()
    with made_again((whole, Saved(weight.reads(), dequantise))):
        given |= {"max_workspace_bytes": cut.left}
        result: Any = linear_cross_entropy(hidden, whole, targets, **given)
    made: Tensor = result
    return made


class _Windows(NamedTuple):
    """Things that all windows and chunks of rows share. Tensors that autograd saves are made once for all."""

    weight: QuantizedWeight
    dtype: torch.dtype
    cut: _Cut
    places: list[slice]
    biases: list[Tensor | None]
    are_padding: list[Tensor | None]  # whether a window's bias is minus infinity, so that its lse is
    class_weight: Tensor | None
    options: dict[str, Any]


def _of_windows(prepared: Prepared, weight: QuantizedWeight, dtype: torch.dtype, cut: _Cut) -> Tensor:
    a, options = prepared.a, prepared.call.options
    vocab, width = weight.shape
    # The library checks numbers with a plan of the whole head, which does not run.
    read, unbounded = inputs_of(a, (None, None), Wants()), options | {"max_workspace_bytes": _options.FASTEST}
    plan_on(spec_of(PassKey(_options.FORWARD), read, unbounded), a.hidden.device)
    stats = stats_dtype(a.hidden)
    targets = a.targets.reshape(1) if a.targets.dim() == 0 else a.targets
    ignored, shift = options["ignore_index"], min(options["shift"], targets.shape[-1])
    flat = torch.full_like(targets, ignored, dtype=torch.int64)
    flat[..., : targets.shape[-1] - shift] = targets[..., shift:]
    flat = flat.reshape(-1)
    if not flat.is_cuda:
        check_targets(targets, vocab, ignore_index=ignored)
    valid = flat != ignored
    wrong = valid & ((flat < 0) | (flat >= vocab))
    known = valid & ~wrong

    # Sums over chunks and windows are those of float32.
    bias = None if a.bias is None else a.bias.to(torch.promote_types(a.bias.dtype, torch.float32))
    class_weight = None if a.class_weight is None else a.class_weight.to(stats)
    token_weight = None if a.token_weight is None else a.token_weight.reshape(-1).to(stats)
    scale, temperature = (
        one if one is not None and one.requires_grad else options[name]
        for name, one in zip(("scale", "temperature"), prepared.learned, strict=True)
    )
    places = [slice(start, min(start + cut.vocab, vocab)) for start in range(0, vocab, cut.vocab)]
    are_padding = [None if bias is None else bias[place].isneginf().all() for place in places]
    windows = _Windows(
        weight=weight.in_float32(),
        dtype=dtype,
        cut=cut,
        places=places,
        biases=[None if p is None else bias[w].where(~p, 0.0) for p, w in zip(are_padding, places)],  # type: ignore[index]
        are_padding=are_padding,
        class_weight=class_weight,
        options={"scale": scale, "softcap": options["softcap"], "temperature": temperature},
    )
    share, parts = options["label_smoothing"], []
    chunks = torch.split(a.hidden.reshape(-1, width), cut.tokens)
    of_rows = None if a.row_temperature is None else a.row_temperature.reshape(-1)
    for start, rows in zip(range(0, len(flat), cut.tokens), chunks, strict=True):
        chunk = slice(start, start + cut.tokens)
        chosen = {} if of_rows is None else {"temperature": of_rows[chunk]}
        parts.append(_chunk(rows, flat[chunk].where(known[chunk], -100), windows, share != 0, chosen))
    nll, lse, smoothing = (torch.cat(each) for each in zip(*parts, strict=True))

    of_class: Any = 1.0 if class_weight is None else class_weight[flat.where(known, 0)]
    of_token: Any = 1.0 if token_weight is None else token_weight
    loss: Tensor = (1 - share) * of_class * nll + share / vocab * smoothing + options["z_loss"] * lse.square()
    loss = (of_token * loss).where(valid, 0.0).where(~wrong, math.nan)
    if a.reduction == "none":
        return loss.reshape(a.targets.shape)
    loss = loss.sum()
    if a.reduction == "mean":
        items = a.num_items
        if items is None:
            items = (torch.ones_like(nll) * of_class * of_token).where(valid, 0.0).sum()
        loss = loss / (items.detach().reshape(()).to(stats) if isinstance(items, Tensor) else items)
    return loss


def _chunk(
    rows: Tensor, targets: Tensor, windows: _Windows, smooths: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns nll, lse and the sum over classes of class_weight * (lse - logit), of rows with targets or -100."""
    wide = (rows, Saved([rows]))
    if windows.dtype.itemsize == 2:  # the gradients of windows are added in float32
        wide = (rows.float(), Saved([rows], rows.detach().float))
    each = [_window(index, wide, targets, windows, smooths, options) for index in range(len(windows.places))]
    own, picked, smoothed, factors = zip(*each, strict=True)
    lse = torch.logsumexp(torch.stack(own), 0)
    smoothing = torch.zeros_like(lse)
    if smooths:
        smoothing = sum((s + f * (lse - o) for s, f, o in zip(smoothed, factors, own)), smoothing)
    return lse - sum(picked), lse, smoothing


def _window(
    index: int,
    wide: tuple[Tensor, Saved],
    targets: Tensor,
    windows: _Windows,
    smooths: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Any, Any]:
    """Returns a window's lse, its logits of targets, the sum over classes of class_weight * (lse - logit), and that of
    class_weight; the last two are 0 without label smoothing."""
    weight, dtype, place, is_padding = windows.weight, windows.dtype, windows.places[index], windows.are_padding[index]
    start, stop = place.start, place.stop
    dequantise = functools.partial(weight.rows, start, stop, dtype, windows.cut.piece)
    rows = dequantise()
    inside = (targets >= start) & (targets < stop)
    of_class = windows.class_weight[place] if smooths and windows.class_weight is not None else None
    made = ((rows, Saved(weight.reads(), dequantise)), wide)
    with made_again(*made), torch.autocast(rows.device.type, dtype, enabled=dtype.itemsize == 2):
        result: Any = linear_cross_entropy(
            wide[0],
            rows,
            (targets - start).where(inside, targets.clamp(max=0)),  # elsewhere a class of the window, or -100
            bias=windows.biases[index],
            class_weight=of_class,
            reduction="none",
            label_smoothing=float(smooths),
            return_stats=("nll", "lse"),
            recompute_logits=True,
            max_workspace_bytes=windows.cut.left,
            **windows.options | options,
        )
    lse, picked = result.lse, (result.lse - result.nll).where(inside, 0.0)
    if is_padding is not None:
        lse, picked = lse.where(~is_padding, -math.inf), picked.where(~(inside & is_padding), -math.inf)
    if not smooths:
        return lse, picked, 0.0, 0.0
    return lse, picked, result.loss * (stop - start), stop - start if of_class is None else of_class.sum()
