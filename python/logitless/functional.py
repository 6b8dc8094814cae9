"""``logitless.linear_cross_entropy``, ``linear_log_probs`` and ``linear_top_k`` for PyTorch tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from . import options as _options
from .call import Arguments, can_run_eagerly, has_dtensor, with_row_temperature
from .errors import InvalidTargetError, UnsupportedError
from .options import HeadOptions, IdOptions, TopKOptions, accepts, shape_text
from .outputs import LinearCrossEntropyOutput, LinearTopK, log_probs, loss, top_k

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
    """Cross entropy of ``softmax(hidden @ weight.T)`` and its gradients, without ever holding the logits.

    For row i with hidden state E_i, target y and class weights w (ones without)::

        z_ij   = t(scale * (E_i . C_j) + bias_j) / T_i,   t = identity, or softcap * tanh(. / softcap)
        lse_i  = log sum_j exp z_ij,  nll_i = lse_i - z_iy,  entropy_i = lse_i - sum_j p_ij z_ij
        loss_i = token_weight_i * ((1 - label_smoothing) * w_y * nll_i
                 + label_smoothing / V * sum_j w_j (lse_i - z_ij) + z_loss * lse_i ** 2)

    T is the temperature. With ``scale = 1`` and without softcap, temperature, z_loss and token weights this is
    ``F.cross_entropy(F.linear(hidden, weight, bias), targets, ...)``.

    A row may have several targets y_k of the weights q_k: soft labels, the largest probabilities of a teacher, several
    right classes. Then ``nll_i = sum_k q_k (lse_i - z_iy_k)``, and ``target_logit`` is ``sum_k q_k z_iy_k``::

        logitless.linear_cross_entropy(hidden, lm_head.weight, teacher_ids, target_weight=teacher_probs)  # [..., K]

    Args:
        hidden: hidden states, ``[..., D]``; float32, bfloat16, float16, or float64 (then everything is float64, as
            gradcheck wants it: correct and slow). Row strides are honoured; the last dimension is copied unless
            contiguous.
        weight: the head's weight, ``[V, D]``; any of these dtypes, not necessarily that of ``hidden``.
        targets: class indices, int64 or int32, of shape ``hidden.shape[:-1]``; with ``target_weight`` ``[..., K]``,
            K <= 64, several targets a row. Of these one of ``ignore_index`` is none, and a row is ignored whose targets
            all are. Probabilities of all V classes are not taken.
        bias: ``[V]``.
        class_weight: class weights, ``[V]``. Not with several targets a row.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The mean divides by ``num_items``, or without it by the sum
            of ``token_weight_i * w_y`` over valid rows: NaN without any valid row.
        ignore_index: rows with this target have no loss and no gradient. None means -100.
        label_smoothing: in [0, 1].
        scale: factor of the logits before bias and softcap. It may be learned: a tensor of one element that requires
            grad has a gradient, which wants a magnitude of at least 2^-64 and a float32 ``d_hidden`` beside the
            workspace. Reading it waits for its device, once a call: keep it on the CPU where that matters.
        softcap: bound of the logits; None or 0 for none.
        temperature: what the logits are divided by, after the softcap: all statistics and the loss are of these
            logits. A number > 0; a tensor of one element, which may be learned as ``scale`` may (without a softcap
            only); or a tensor of the target's shape, one for each row (row s predicts ``targets[s + shift]``), which is
            a constant. A row of its own with a value that is not in [2^-126, 2^126] is NaN, in loss, statistics and
            gradient, unless it is ignored.
        z_loss: factor of ``lse ** 2``. Like ``label_smoothing``, ``scale``, ``softcap``, ``temperature`` and
            ``threshold`` a number or a tensor of one element, which is read as that of ``scale`` is; only ``scale`` and
            ``temperature`` have a gradient. Compiled code serves all values of a number that changes, but of a
            threshold where draws are kept (see below).
        token_weight: weights of rows, of the target's shape; row s is the one that *predicts* ``targets[s + shift]``.
        target_weight: weights of several targets a row, of the target's shape: any finite numbers, which need not sum
            to 1. Without it a row has one target. They are constants; :func:`linear_log_probs` gives what has a
            gradient with respect to them. The mean does not divide by them. Not with sparsified gradients.
        num_items: divisor of the mean, a number or a tensor of one element, which is read where it is. By 0 the loss is
            infinite or NaN, as PyTorch's.
        shift: position s of the last target dimension predicts ``targets[..., s + shift]``, without copying hidden.
        max_workspace_bytes: hard bound of memory beyond inputs, outputs and gradients, for each pass: a number of
            bytes, or a size such as ``"256MiB"``. None: the smallest plan predicted within 3% of the fastest, and no
            more than a quarter of the float32 logits + 64 MiB while that costs at most 6%; ``"fastest"``: the fastest
            plan, whatever it takes.
        main_grad: a float32 ``[V, D]`` buffer to which the gradient of ``weight`` is added in a backward pass
            that leads to ``weight`` (``torch.autograd.grad(loss, hidden)`` does not, but of compiled code, which
            always adds it); autograd then sees no gradient of it. Used only when ``weight`` requires grad. It
            shares no memory with the other tensors of the call; calls may share it, or parts of it.
        return_stats: True for ``nll, lse, entropy, argmax, correct_count, valid_count``, or names out of these and
            ``target_logit, mean_logit, log_sum_sq_probs, is_top1, max_logit``; of sparsified gradients also
            ``kept_count`` and ``draw_variance``.
        differentiable_stats: False detaches the statistics, so that asking for them costs no recomputation (below).
        gradient: ``"exact"``, or ``"sparsified"``: unbiased, from about 1 / threshold elements of a row's softmax at
            most (docs/sparsified.md); on CUDA it is exact where a flat softmax of these sizes would be slower to
            sparsify, as of a small vocabulary. ``"always-sparsified"`` never is. The loss is exact in all cases.
        threshold: of sparsified gradients, in [2^-126, 1]: softmax elements of at least this size and the
            target's are kept as they are, smaller ones by chance.
        seed: of sparsified gradients: the same seed gives the same bits. An integer, a tensor of one int64 element
        (read
            where it is, so that a CUDA graph may change it), or a generator of the hidden states' device. None draws
            one
            from the device's default generator, so ``torch.manual_seed`` makes training repeatable.
        batch_invariant: True: a row's loss, ``nll``, ``lse`` and ``entropy`` have the same bits whatever the other rows
            are, how many and in which place, and whether gradients are made, under any budget. The CPU's always do. Not
            with sparsified gradients; the gradient of ``hidden`` is not promised to (docs/numerics.md).

    DTensors, and weights that FSDP2 has sharded: docs/distributed.md. What they return are DTensors, replicated or
    sharded as the hidden states' tokens are; an FSDP weight with plain hidden states returns plain tensors.

    Returns:
        The loss: a scalar, or of the target's shape with reduction "none"; float32 (float64 for float64 inputs),
        also under autocast. With ``return_stats`` a :class:`LinearCrossEntropyOutput`.

    Raises:
        TypeError: wrong type, dtype or layout of an argument; DTensors among plain tensors, with what to pass instead.
        ValueError: wrong shape, device or range; ``InvalidTargetError`` for a target outside ``[0, V)`` on the CPU
            (on CUDA, which nothing waits for, its loss is NaN and its gradient 0: see :func:`check_targets`);
            ``BudgetTooSmallError`` (with ``required_bytes``) when no plan fits ``max_workspace_bytes``.
        NotImplementedError: double backward, forward-mode differentiation, transforms of torch.func (upstream gradients
            in a batch, as with ``torch.autograd.grad(..., is_grads_batched=True)``, are run one after the other).

    Work, in units of one product of hidden and weight: loss only 1; with gradients 3, computed already in the forward
    pass (reduction "mean" and "sum"); 4 where the upstream gradients must be known first: reduction "none",
    ``main_grad``, float16 gradients (which would underflow before a loss scale is applied), and differentiable
    statistics. Under autocast the products round float32 hidden and weight a part at a time,
    without copies of them, and write float32 gradients at once; others are cast as for ``F.linear``. On CUDA float32
    products use TF32 where PyTorch permits it (``torch.backends.cuda.matmul``). Sparsified gradients take less
    than half the time of exact ones on a trained head (docs/results.md); where upstream gradients come
    later, the drawn elements are kept for them. ``kept_count`` and ``draw_variance`` are those of the gradient of the
    loss: free where gradients are made in the forward pass, and else (also without any gradient) from a draw of their
    own, at the cost of a second forward pass.
    """
    _options.check_names("linear_cross_entropy", options, _options.HEAD_OPTIONS)
    a = Arguments(hidden, weight, targets, return_stats=return_stats, **options)
    if isinstance(a.temperature, Tensor):
        a = with_row_temperature(a, getattr(hidden, "shape", ())[:-1])
    plain = can_run_eagerly(a)
    if not plain and has_dtensor(a):
        from .distributed import _dtensor

        of_dtensors: Tensor | LinearCrossEntropyOutput = _dtensor.linear_cross_entropy(a)
        return of_dtensors
    return loss(a, plain)


@accepts(IdOptions)
def linear_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, **options: Unpack[IdOptions]) -> Tensor:
    """Log-probabilities of given ids under ``softmax(hidden @ weight.T)``, without ever holding the logits.

    Logits are those of :func:`linear_cross_entropy`, and so is what its options mean.

    Args:
        hidden: hidden states, ``[..., D]``.
        weight: the head's weight, ``[V, D]``.
        ids: int64 or int32, ``[..., K]`` with K <= 64; the same one may come several times in a row.
        bias, scale, softcap, max_workspace_bytes, batch_invariant: as in :func:`linear_cross_entropy`.
        ignore_index: an id that is none: its log-probability is 0 and has no gradient. A row of such ids alone costs
            nothing. None means -100.
        temperature: as in :func:`linear_cross_entropy`; a tensor of one for each row has the shape
            ``hidden.shape[:-1]``.

    Returns:
        ``[..., K]``, float32 (float64 for float64 inputs). Differentiable with respect to hidden, weight,
        bias, and a learned scale or temperature.

    Raises:
        TypeError, ValueError, BudgetTooSmallError, NotImplementedError: as :func:`linear_cross_entropy` does;
            ``InvalidTargetError`` for an id outside ``[0, V)`` on the CPU (on CUDA its row's log-probabilities are NaN,
            and the row has no gradient).

    Work, in units of one product of hidden and weight: 1, and 3 in the backward pass.
    """
    _options.check_names("linear_log_probs", options, _options.ID_OPTIONS)
    return log_probs(Arguments(hidden, weight, ids, reduction="sum", **options))


@accepts(TopKOptions)
def linear_top_k(hidden: Tensor, weight: Tensor, k: int, **options: Unpack[TopKOptions]) -> LinearTopK:
    """The k largest logits of each row of ``hidden @ weight.T``, without ever holding all of them.

    Logits are those of :func:`linear_cross_entropy`, and so is what its options mean. The log-probability of a column
    is its logit less the log of the sum of the exponentials of all logits of the row.

    Args:
        hidden: hidden states, ``[..., D]``.
        weight: the head's weight, ``[V, D]``.
        k: how many, from 1 to the smaller one of 64 and V.
        bias, scale, softcap, max_workspace_bytes: as in :func:`linear_cross_entropy`, without gradients.
        temperature: a number, or a tensor of one element or of ``hidden.shape[:-1]``.

    Returns:
        ``ids`` and ``log_probs`` of shape ``[..., k]``, in descending order of the logits: of equals the smaller id is
        first, and a NaN comes before all numbers, so that the first one is the argmax. They have no gradient.

    Raises:
        TypeError, ValueError, BudgetTooSmallError: as :func:`linear_cross_entropy` does.
    """
    _options.check_names("linear_top_k", options, _options.TOP_K_OPTIONS)
    return top_k(Arguments(hidden, weight, hidden, reduction="sum", **options), k)


def check_targets(targets: Tensor, vocab: int, *, ignore_index: int = -100) -> None:
    """Raises for the first target outside ``[0, vocab)`` that is not ``ignore_index``. Waits for a CUDA device.

    Args:
        targets: class indices of any shape.
        vocab: V.
        ignore_index: the target of rows that are left out.

    Raises:
        InvalidTargetError: with place and value.
    """
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InvalidTargetError(
            f"targets: expected 0 <= target < {vocab} or ignore_index {ignore_index}, "
            f"got {int(targets[place])} at targets{shape_text(place)}"
        )


def warm_up(device: torch.device | str | int | None = None) -> None:
    """Makes what the library and CUDA make at first use, so that the first run may be captured in a CUDA graph.

    A run makes nothing but its own work, except the first on a device: it opens cuBLASLt and creates its handle, which
    allocates memory of the device, and CUDA loads kernels when they are first called. This runs small problems of each
    dtype and kind of gradient, and waits for the device. A product of a shape that is new to cuBLASLt is looked up in
    its tables at its first run, which a capture allows.

    Args:
        device: a CUDA device, or the CPU, where there is little to make; None: PyTorch's current CUDA device, or the
            CPU where there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected the CPU or a CUDA device, got {place}")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(place.type, enabled=False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            with contextlib.suppress(UnsupportedError):  # of an engine chosen by name
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
