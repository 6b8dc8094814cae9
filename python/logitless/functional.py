"""``logitless.linear_cross_entropy`` for PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, overload

from torch import Tensor

from . import _options, _stats
from ._arguments import Arguments, Number, Seed, temperatures
from ._dispatch import by_operators
from ._eager import suits, without_operators
from ._modes import has_dtensor
from ._options import shape_text
from .errors import InvalidTargetError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LinearCrossEntropyOutput(NamedTuple):
    """What ``return_stats`` asked for; the others are None. Per-token tensors have the shape ``input.shape[:-1]``.

    Rows without a target (``ignore_index``, or none after the shift) hold 0, and -1 in ``argmax``. ``nll``, ``lse``,
    ``entropy`` and ``target_logit`` are differentiable (see ``differentiable_stats``). The target's log-probability is
    ``-nll``.

    Of the logits z, after scale, softcap and temperature: ``target_logit`` is z_y, ``mean_logit`` sum_j z_j / V,
    ``max_logit`` the largest, ``log_sum_sq_probs`` log sum_j p_j^2 (minus the Renyi entropy of order 2), and
    ``is_top1`` (bool) says whether the target is the argmax, the first of equals. Of several targets a row, there is no
    ``is_top1`` and no ``correct_count``.

    Of thinned gradients: ``kept_count`` (int32) says how many elements a row's gradient was made of, its target
    included; ``draw_variance`` estimates the variance of the drawn row of dz over its squared norm, so its root is
    the row's relative error.
    """

    loss: Tensor
    nll: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    correct_count: Tensor | None = None
    valid_count: Tensor | None = None
    kept_count: Tensor | None = None
    draw_variance: Tensor | None = None
    target_logit: Tensor | None = None
    mean_logit: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None
    max_logit: Tensor | None = None


class _Options(TypedDict, total=False):
    linear_bias: Tensor | None
    weight: Tensor | None
    target_weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: Number
    scale: Number
    softcap: Number | None
    temperature: Number
    z_loss: Number
    token_weight: Tensor | None
    num_items: Number | None
    shift: int
    max_workspace_bytes: int | str | None
    main_grad: Tensor | None
    differentiable_stats: bool
    gradient: str
    threshold: Number
    seed: Seed
    batch_invariant: bool


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_stats: Literal[True] | Sequence[str],
    **options: Unpack[_Options],
) -> LinearCrossEntropyOutput: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_stats: bool | Sequence[str],
    **options: Unpack[_Options],
) -> Tensor | LinearCrossEntropyOutput: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: Number = 0.0,
    scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    z_loss: Number = 0.0,
    token_weight: Tensor | None = None,
    target_weight: Tensor | None = None,
    num_items: Number | None = None,
    shift: int = 0,
    max_workspace_bytes: int | str | None = None,
    main_grad: Tensor | None = None,
    return_stats: bool | Sequence[str] = False,
    differentiable_stats: bool = True,
    gradient: str = "exact",
    threshold: Number = _options.DEFAULT_THRESHOLD,
    seed: Seed = None,
    batch_invariant: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """Cross entropy of ``softmax(input @ linear_weight.T)`` and its gradients, without ever holding the logits.

    For row i with hidden state E_i, target y and class weights w (ones without)::

        z_ij   = t(scale * (E_i . C_j) + bias_j) / T_i,   t = identity, or softcap * tanh(. / softcap)
        lse_i  = log sum_j exp z_ij,  nll_i = lse_i - z_iy,  entropy_i = lse_i - sum_j p_ij z_ij
        loss_i = token_weight_i * ((1 - label_smoothing) * w_y * nll_i
                 + label_smoothing / V * sum_j w_j (lse_i - z_ij) + z_loss * lse_i ** 2)

    T is the temperature. With ``scale = 1`` and without softcap, temperature, z_loss and token weights this is
    ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)``.

    A row may have several targets y_k of the weights q_k: soft labels, the largest probabilities of a teacher, several
    right classes. Then ``nll_i = sum_k q_k (lse_i - z_iy_k)``, and ``target_logit`` is ``sum_k q_k z_iy_k``::

        logitless.linear_cross_entropy(hidden, lm_head.weight, teacher_ids, target_weight=teacher_probs)  # [..., K]

    Args:
        input: hidden states, ``[..., D]``; float32, bfloat16, float16, or float64 (then everything is float64, as
            gradcheck wants it: correct and slow). Row strides are honoured; the last dimension is copied unless
            contiguous.
        linear_weight: the head's weight, ``[V, D]``; any of these dtypes, not necessarily that of ``input``.
        target: class indices, int64 or int32, of shape ``input.shape[:-1]``; with ``target_weight`` ``[..., K]``,
            K <= 64, several targets a row. Of these one of ``ignore_index`` is none, and a row is ignored whose targets
            all are. Probabilities of all V classes are not taken.
        linear_bias: ``[V]``.
        weight: class weights, ``[V]``. Not with several targets a row.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. The mean divides by ``num_items``, or without it by the sum
            of ``token_weight_i * w_y`` over valid rows: NaN without any valid row.
        ignore_index: rows with this target have no loss and no gradient. None means -100.
        label_smoothing: in [0, 1].
        scale: factor of the logits before bias and softcap. It may be learned: a tensor of one element that requires
            grad has a gradient, which wants a magnitude of at least 2^-64 and a float32 ``d_input`` beside the
            workspace. Reading it waits for its device, once a call: keep it on the CPU where that matters.
        softcap: bound of the logits; None or 0 for none.
        temperature: what the logits are divided by, after the softcap: all statistics and the loss are of these
            logits. A number > 0; a tensor of one element, which may be learned as ``scale`` may (without a softcap
            only); or a tensor of the target's shape, one for each row (row s predicts ``target[s + shift]``), which is
            a constant. A row of its own with a value that is not in [2^-126, 2^126] is NaN, in loss, statistics and
            gradient, unless it is ignored.
        z_loss: factor of ``lse ** 2``. Like ``label_smoothing``, ``scale``, ``softcap``, ``temperature`` and
            ``threshold`` a number or a tensor of one element, which is read as that of ``scale`` is; only ``scale`` and
            ``temperature`` have a gradient. Compiled code serves all values of a number that changes, but of a
            threshold where draws are kept (see below).
        token_weight: weights of rows, of the target's shape; row s is the one that *predicts* ``target[s + shift]``.
        target_weight: weights of several targets a row, of the target's shape: any finite numbers, which need not sum
            to 1. Without it a row has one target. They are constants; :func:`linear_log_probs` gives what has a
            gradient with respect to them. The mean does not divide by them. Not with thinned gradients.
        num_items: divisor of the mean, a number or a tensor of one element, which is read where it is. By 0 the loss is
            infinite or NaN, as PyTorch's.
        shift: position s of the last target dimension predicts ``target[..., s + shift]``, without copying input.
        max_workspace_bytes: hard bound of memory beyond inputs, outputs and gradients, for each pass: a number of
            bytes, or a size such as ``"256MiB"``. None: the smallest plan predicted within 3% of the fastest, and no
            more than a quarter of the float32 logits + 64 MiB while that costs at most 6%; ``"fastest"``: the fastest
            plan, whatever it takes.
        main_grad: a float32 ``[V, D]`` buffer to which the gradient of ``linear_weight`` is added in a backward pass
            that leads to ``linear_weight`` (``torch.autograd.grad(loss, input)`` does not, but of compiled code, which
            always adds it); autograd then sees no gradient of it. Used only when ``linear_weight`` requires grad. It
            shares no memory with the other tensors of the call; calls may share it, or parts of it.
        return_stats: True for ``nll, lse, entropy, argmax, correct_count, valid_count``, or names out of these and
            ``target_logit, mean_logit, log_sum_sq_probs, is_top1, max_logit``; of thinned gradients also
            ``kept_count`` and ``draw_variance``.
        differentiable_stats: False detaches the statistics, so that asking for them costs no recomputation (below).
        gradient: ``"exact"``, or ``"thinned"``: unbiased, from about 1 / threshold elements of a row's softmax at
            most (docs/thinning.md); on CUDA it is exact where a flat softmax of these sizes would be slower to thin, as
            of a small vocabulary. ``"always-thinned"`` never is. The loss is exact in all cases.
        threshold: of thinned gradients, in [2^-126, 1]: softmax elements of at least this size and the
            target's are kept as they are, smaller ones by chance.
        seed: of thinned gradients: the same seed gives the same bits. An integer, a tensor of one int64 element (read
            where it is, so that a CUDA graph may change it), or a generator of the input's device. None draws one
            from the device's default generator, so ``torch.manual_seed`` makes training repeatable.
        batch_invariant: True: a row's loss, ``nll``, ``lse`` and ``entropy`` have the same bits whatever the other rows
            are, how many and in which place, and whether gradients are made, under any budget. The CPU's always do. Not
            with thinned gradients; the gradient of ``input`` is not promised to (docs/numerics.md).

    DTensors, and weights that FSDP2 has sharded: docs/parallel_clients.md. What they return are DTensors, replicated or
    sharded as the input's tokens are; an FSDP weight with a plain input returns plain tensors.

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

    Work, in units of one product of input and weight: loss only 1; with gradients 3, computed already in the forward
    pass (reduction "mean" and "sum"); 4 where the upstream gradients must be known first: reduction "none",
    ``main_grad``, float16 gradients (which would underflow before a loss scale is applied), and differentiable
    statistics. Under autocast the products round float32 input and weight a part at a time,
    without copies of them, and write float32 gradients at once; others are cast as for ``F.linear``. On CUDA float32
    products use TF32 where PyTorch permits it (``torch.backends.cuda.matmul``). Thinned gradients take less
    than half the time of exact ones on a trained head (docs/results_thinned.md); where upstream gradients come later,
    the drawn elements are kept for them. ``kept_count`` and ``draw_variance`` are those of the gradient of the loss:
    free where gradients are made in the forward pass, and else (also without any gradient) from a draw of their own, at
    the cost of a second forward pass.
    """
    row_temperature, temperature = temperatures(temperature, getattr(input, "shape", ())[:-1])
    arguments = Arguments(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        token_weight,
        row_temperature,
        target_weight,
        main_grad,
        num_items,
        seed,
        reduction,
        ignore_index,
        label_smoothing,
        scale,
        softcap,
        temperature,
        z_loss,
        shift,
        max_workspace_bytes,
        return_stats,
        differentiable_stats,
        gradient,
        threshold,
        batch_invariant,
    )
    if suits(arguments):
        found, names = without_operators(arguments)
    elif has_dtensor(arguments):
        from .distributed import _dtensor

        of_dtensors: Tensor | LinearCrossEntropyOutput = _dtensor.linear_cross_entropy(arguments)
        return of_dtensors
    else:
        found, names = by_operators(arguments)
    loss = found["loss"]
    rows = input.shape[:-1]
    if reduction == "none" and len(rows) != 1:
        loss = loss.reshape(rows)
    if return_stats is False:
        return loss
    return collect(loss, found, rows, names, differentiable_stats)


def collect(
    loss: Tensor, found: dict[str, Tensor], rows: Sequence[int], names: tuple[str, ...], differentiable: bool
) -> LinearCrossEntropyOutput:
    """rows: the shape of what is told of each row."""
    asked: dict[str, Tensor] = {}
    for name in names:
        if name in _stats.COUNTS:
            asked[name] = found["counts"][tuple(_stats.COUNTS).index(name)]
        else:
            value = found[name].reshape(rows)
            asked[name] = value if differentiable else value.detach()
    return LinearCrossEntropyOutput(loss=loss, **asked)


def check_targets(target: Tensor, vocab: int, *, ignore_index: int = -100) -> None:
    """Raises for the first target outside ``[0, vocab)`` that is not ``ignore_index``. Waits for a CUDA device.

    Args:
        target: class indices of any shape.
        vocab: V.
        ignore_index: the target of rows that are left out.

    Raises:
        InvalidTargetError: with place and value.
    """
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InvalidTargetError(
            f"target: expected 0 <= target < {vocab} or ignore_index {ignore_index}, "
            f"got {int(target[place])} at target{shape_text(place)}"
        )
