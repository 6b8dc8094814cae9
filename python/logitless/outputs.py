"""Results of the package's functions, made of what a call has found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from . import options as _options
from .autograd import perform
from .call import Arguments, CallOf, Prepared, check_tensor, ids_of, prepare, tokens_of, with_row_temperature
from .options import check_targets_shape


class LinearCrossEntropyOutput(NamedTuple):
    """Statistics that ``return_stats`` asked for; the others are None.

    Per-token tensors have the shape ``hidden.shape[:-1]``.

    Rows without a target (``ignore_index``, or none after the shift) hold 0, and -1 in ``argmax``. ``nll``, ``lse``,
    ``entropy`` and ``target_logit`` are differentiable (see ``differentiable_stats``). The target's log-probability is
    ``-nll``.

    Of the logits z, after scale, softcap and temperature: ``target_logit`` is z_y, ``mean_logit`` sum_j z_j / V,
    ``max_logit`` the largest, ``log_sum_sq_probs`` log sum_j p_j^2 (minus the Renyi entropy of order 2), and
    ``is_top1`` (bool) says whether the target is the argmax, the first of equals. Of several targets a row, there is no
    ``is_top1`` and no ``correct_count``.

    Of sparsified gradients: ``kept_count`` (int32) says how many elements a row's gradient was made of, its target
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


class LinearTopK(NamedTuple):
    """The largest logits of each row, in descending order."""

    ids: Tensor  # int64
    log_probs: Tensor  # float32, or float64 for float64 inputs


def loss_of(prepared: Prepared, rows: Sequence[int] | None = None) -> Tensor | LinearCrossEntropyOutput:
    """The result of linear_cross_entropy. rows: the shape of per-row outputs, where the hidden states have another."""
    outputs, a = perform(prepared), prepared.a
    loss = outputs["loss"]
    if a.return_stats is False and a.reduction != "none":
        return loss
    rows = a.rows() if rows is None else rows
    if a.reduction == "none" and len(rows) != 1:
        loss = loss.reshape(rows)
    if a.return_stats is False:
        return loss
    stats: dict[str, Tensor] = {}
    for name in prepared.call.names:
        if name in _options.COUNTS:
            stats[name] = outputs["counts"][_options.COUNTS.index(name)]
        else:
            value = outputs[name].reshape(rows)
            stats[name] = value if a.differentiable_stats else value.detach()
    return LinearCrossEntropyOutput(loss=loss, **stats)


def loss(a: Arguments, plain: bool | None = None) -> Tensor | LinearCrossEntropyOutput:
    """The loss of a whole vocabulary, without DTensors. plain: as in prepare()."""
    return loss_of(prepare(a, plain=plain))


def log_probs_of(prepared: Prepared, rows: Sequence[int]) -> Tensor:
    return perform(prepared)["target_log_probs"].reshape((*rows, prepared.a.targets.shape[-1]))


def log_probs(a: Arguments) -> Tensor:
    """Log-probabilities of a whole vocabulary; the targets are the ids."""
    rows = getattr(a.hidden, "shape", ())[:-1]
    a = with_row_temperature(ids_of(a), rows)
    check_targets_shape("ids", a.targets.shape, rows, True)
    return log_probs_of(prepare(a, CallOf("linear_log_probs")), rows)


def top_k_of(prepared: Prepared, rows: Sequence[int], k: int) -> LinearTopK:
    outputs = perform(prepared)
    return LinearTopK(outputs["top_ids"].reshape((*rows, k)), outputs["top_log_probs"].reshape((*rows, k)))


def top_k(a: Arguments, k: int) -> LinearTopK:
    """The largest logits of a whole vocabulary; there are no targets."""
    check_tensor("hidden", a.hidden)
    rows = a.hidden.shape[:-1]
    a = with_row_temperature(tokens_of(a, rows), rows)
    k = _options.checked_k(k, *getattr(a.weight, "shape", ())[:1])
    return top_k_of(prepare(a, CallOf("linear_top_k", k)), rows, k)
