"""The results of the package's functions, made from the outputs of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import options as _options
from .autograd import perform, run_again
from .call import (
    TENSORS,
    Arguments,
    CallOf,
    Prepared,
    can_run_eagerly,
    check_tensor,
    ids_of,
    prepare,
    tokens_of,
    with_row_temperature,
)
from .native import Cache
from .options import check_targets_shape
from .screened import ScreenedWeight


class LinearCrossEntropyOutput(NamedTuple):
    """The loss and the statistics that ``return_stats`` requested; the others are None.

    Tensors of rows have the shape ``hidden.shape[:-1]``. Rows without a target (``ignore_index``, or none after the
    shift) hold 0, and -1 in ``argmax``. ``nll``, ``lse``, ``entropy`` and ``target_logit`` are differentiable (see
    ``differentiable_stats``). The logits z are those after scale, softcap and temperature.

    Attributes:
        loss: The loss, a scalar, or one for each row with reduction "none".
        nll: lse - z_y, so ``-nll`` is the target's log-probability.
        lse: log sum_j exp z_j.
        entropy: The entropy of the softmax, in nats.
        argmax: The class of the largest logit, the first of equal ones; int64.
        correct_count: The number of rows whose target is the argmax; None with several targets a row.
        valid_count: The number of rows with a target.
        kept_count: The number of elements, the target's included, from which a row's sparsified gradient was made;
            int32.
        draw_variance: An estimate of the variance of the drawn row of dz over its squared norm. Its root is the row's
            relative error.
        target_logit: z_y.
        mean_logit: sum_j z_j / V.
        log_sum_sq_probs: log sum_j p_j^2, which is minus the Renyi entropy of order 2.
        is_top1: Whether the target is the argmax; bool. None with several targets a row.
        max_logit: The largest z_j.
        loss_error: With a ``screen``, an estimate of the standard error of nll, which is an estimate itself.
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
    loss_error: Tensor | None = None


class LinearTopK(NamedTuple):
    """The largest logits of each row, in descending order."""

    ids: Tensor  # int64
    log_probs: Tensor  # float32, or float64 for float64 inputs


def loss_of(prepared: Prepared, rows: Sequence[int] | None = None) -> Tensor | LinearCrossEntropyOutput:
    """Returns the result of linear_cross_entropy. rows: the shape of per-row outputs; None: hidden's."""
    return result_of(prepared, perform(prepared), rows)


def result_of(
    prepared: Prepared, outputs: Mapping[str, Tensor], rows: Sequence[int] | None = None
) -> Tensor | LinearCrossEntropyOutput:
    """As loss_of(), from the outputs of the call."""
    a, loss = prepared.a, outputs["loss"]
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


# ---- calls without gradients that were made before, by key_of()


class Known(NamedTuple):
    """A call without its tensors, which the library reads as they are."""

    prepared: Prepared
    rows: Sequence[int]

    def run(self, tensors: Sequence[Tensor | None]) -> Mapping[str, Tensor]:
        """tensors: in the order of Arguments."""
        reads: Any = self.prepared.call.reads
        return run_again(self.prepared.call, dict(zip(reads, tensors)))  # type: ignore[arg-type]


_known: Cache[Any, Known] = Cache(256)


def known(key: Any) -> Known | None:
    return None if key is None else _known.get(key)


def _keep(key: Any, a: Arguments, prepared: Prepared) -> None:
    """Keeps a call that has run. a: before it was prepared."""
    call = prepared.call
    if key is None or call.trains or call.reads is None:
        return
    if all(own is given for own, given in zip(prepared.a[: len(call.reads)], a)):
        bare = prepared.a._replace(**dict.fromkeys(Arguments._fields[:TENSORS]))
        _known.put(key, Known(prepared._replace(a=bare), a.rows()))


def loss(a: Arguments, plain: bool | None = None, key: Any = None) -> Tensor | LinearCrossEntropyOutput:
    """Returns the loss over a whole vocabulary, without DTensors. plain: as in prepare()."""
    screen = a.screen
    if isinstance(screen, ScreenedWeight):
        screen.check(a.weight)
        prepared = prepare(a._replace(screen="fp8"), plain=plain)._replace(screen=screen)
    else:
        prepared = prepare(a, plain=plain)
    result = loss_of(prepared)
    _keep(key, a, prepared)
    return result


def log_probs_of(prepared: Prepared, rows: Sequence[int]) -> Tensor:
    return perform(prepared)["target_log_probs"].reshape((*rows, prepared.a.targets.shape[-1]))


def log_probs(a: Arguments) -> Tensor:
    """Returns log-probabilities over a whole vocabulary; the targets are the ids."""
    rows = getattr(a.hidden, "shape", ())[:-1]
    a = with_row_temperature(ids_of(a), rows)
    check_targets_shape("ids", a.targets.shape, rows, True)
    return log_probs_of(prepare(a, CallOf("linear_log_probs")), rows)


def top_k_of(outputs: Mapping[str, Tensor], rows: Sequence[int], k: int) -> LinearTopK:
    ids, log_probs = outputs["top_ids"], outputs["top_log_probs"]
    if len(rows) != 1:
        ids, log_probs = (each.reshape((*rows, k)) for each in (ids, log_probs))
    return LinearTopK(ids, log_probs)


def top_k(a: Arguments, k: int, key: Any = None) -> LinearTopK:
    """Returns the largest logits of a whole vocabulary; there are no targets."""
    rows = getattr(a.hidden, "shape", ())[:-1]
    a = with_row_temperature(a, rows)
    plain = can_run_eagerly(a)
    if not plain:
        check_tensor("hidden", a.hidden)
    k = _options.checked_k(k, *getattr(a.weight, "shape", ())[:1])
    a = tokens_of(a, rows)
    prepared = prepare(a, CallOf("linear_top_k", k), plain)
    outputs = perform(prepared)
    _keep(key, a, prepared)
    return top_k_of(outputs, rows, k)
