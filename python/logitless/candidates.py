"""``logitless.linear_candidates``: a head's probabilities over a list of ids for each row, and losses over such lists.

Sampled ids, a teacher's most probable tokens, a drafter's vocabulary or the negatives of a recommender are such lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from . import call
from . import options as _options
from ._candidates.operators import ListArguments, check_budget, logits_of, shared_logits
from ._candidates.samplers import Sampler, in_batch_negatives, with_negatives
from ._candidates.segments import Lists
from .errors import InvalidArgumentError, InvalidTargetError
from .functional import linear_cross_entropy
from .options import LOGIT_NUMBERS, TargetOptions, TopKOptions, accepts
from .run import DTYPES, stats_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LinearCandidatesOutput",
    "Sampler",
    "forward_kl",
    "generalized_jsd",
    "in_batch_negatives",
    "linear_candidates",
    "reverse_kl",
    "soft_cross_entropy",
    "with_negatives",
]

NORMALIZE = ("candidates", "vocabulary")
WEIGHT_GRADIENTS = ("dense", "rows")


class LinearCandidatesOutput(NamedTuple):
    """The result of :func:`linear_candidates`. All of it is differentiable, in float32 (float64 for float64 inputs).

    Attributes:
        log_probs: z - lse of each candidate; -inf for ``ignore_id``.
        lse: log sum exp z of each row, over its candidates or the vocabulary.
        logits: z of each candidate, after ``log_weights``; -inf for ``ignore_id``.
        entropy: The entropy of each row's distribution, in nats; None unless it was requested.
        target_log_probs: The log-probability of each row's target; None without targets.
        loss: The cross entropy of the targets; None without targets.
    """

    log_probs: Tensor
    lse: Tensor
    logits: Tensor
    entropy: Tensor | None = None
    target_log_probs: Tensor | None = None
    loss: Tensor | None = None


class CandidateOptions(TopKOptions, TargetOptions, total=False):
    """Options of a head's logits, of a loss over targets, and those of lists."""

    normalize: str
    targets: Tensor | None
    log_weights: Tensor | None
    ignore_id: int
    return_entropy: bool
    weight_gradient: str


_MORE: dict[str, Any] = {"normalize": "candidates", "targets": None, "log_weights": None, "ignore_id": -1}
_MORE |= {"return_entropy": False, "weight_gradient": "dense"}
accepts_candidates = accepts(CandidateOptions, tuple(_MORE), **_MORE)


@accepts_candidates
def linear_candidates(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    **options: Unpack[CandidateOptions],
) -> LinearCandidatesOutput:
    """Computes log-probabilities of a list of ids for each row, without the logits of other ids.

    With the hidden states E, the weight C and the list L_i of row i::

        z_ij  = t(scale * (E_i . C_j) + bias_j) / T_i + log_weights_ij,   t = identity, or softcap * tanh(. / softcap)
        lse_i = log sum exp z_ij over j in L_i,      or with normalize="vocabulary" over all V columns
        log p_ij = z_ij - lse_i

    The work is that of the lists: ``2 E D`` FLOP for E elements, and twice that for gradients. Only
    ``normalize="vocabulary"`` multiplies the whole weight, as :func:`logitless.linear_cross_entropy` does.

    Args:
        hidden: Hidden states, ``[..., D]``, in float32, bfloat16, float16 or float64.
        weight: The head's weight, ``[V, D]``.
        ids: The candidates, int64 or int32, in any order; an id may come several times, and then counts as often.
            ``[..., K]`` has a list for each row, ``[K]`` one list for all rows, and ``[E]`` with ``offsets`` the lists
            of all rows, one after the other.
        offsets: ``[N + 1]``, int64 or int32: where the lists of the N rows begin, ascending from 0 to E. A list may be
            empty.
        normalize: ``"candidates"`` or ``"vocabulary"``: what probabilities add up to 1 over.
        targets: An id for each row, of the shape ``hidden.shape[:-1]``, or ``ignore_index`` for none. Its probability
            is the sum over its places in the row's list. A target that is not in the list has the log-probability -inf.
            So the loss is infinite, and its row has no gradient from it.
        bias: Added to the logits, ``[V]``.
        log_weights: Added to the logits, of the shape of ``log_probs``: minus the logarithm of the probability
            with which a sampler drew an id, for a sampled softmax. It has a gradient. Numbers for all V ids are passed
            as ``numbers[ids]``. Only with ``normalize="candidates"``.
        scale: Factor of the logits before bias and softcap: a number, or a tensor of one element, which has a gradient
            if it requires one.
        softcap: Bound of the logits. None or 0 means no bound.
        temperature: Divisor of the logits after the softcap: a number, a tensor of one element, which has a gradient
            if it requires one, or a constant for each row of the shape ``hidden.shape[:-1]``. With
            ``normalize="vocabulary"`` a learned one excludes a softcap.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, of the loss over rows with a target.
        ignore_id: An id that stands for none, which makes lists of several lengths one array.
        ignore_index: A target that stands for none. None means -100.
        return_entropy: Whether the entropy is returned.
        weight_gradient: ``"dense"``, or ``"rows"`` for a sparse gradient of the ids that occur, as
            ``nn.Embedding(sparse=True)`` has. The latter is for eager mode and ``normalize="candidates"``, and waits
            for its device.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`, for the workspace of each pass. It must also
            be enough for a later backward pass. Results, numbers of all candidates that PyTorch's losses make, and the
            gathered rows of one list for all rows come beside it.

    Returns:
        A :class:`LinearCandidatesOutput`. ``log_probs`` and ``logits`` have the shape ``[..., K]``, or ``[E]`` with
            ``offsets``; other tensors have one number a row.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or range.
        BudgetTooSmallError: No way to compute the lists fits ``max_workspace_bytes``.
        InvalidTargetError: An id is outside ``[0, V)`` on the CPU. On CUDA, which nothing waits for, its logit is NaN,
            and it has no gradient.
        NotImplementedError: Double backward, forward-mode differentiation or a transform of torch.func.

    Gradients have the same bits in every run.
    """
    given = checked("linear_candidates", hidden, weight, ids, offsets, options)
    return given.output(given.logits(), _of_vocabulary)


_PRODUCTS = {"scale": 1.0, "softcap": 0.0, "temperature": 1.0}  # numbers with which logits are products


class Given(NamedTuple):
    """The checked arguments of a call."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    offsets: Tensor | None
    o: dict[str, Any]  # options
    row_temperature: Tensor | None
    numbers: list[float]  # LOGIT_NUMBERS
    learned: dict[str, Tensor]  # scale and temperature that require gradients, as scalars

    @property
    def stats(self) -> torch.dtype:
        return stats_dtype(self.hidden)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits of all lists."""
        return _shape_of_lists(self.hidden.shape[:-1], self.ids, self.offsets)

    def _operands(self) -> tuple[Tensor, Tensor, int]:
        """Returns the hidden states of all rows, the weight, and the dtype to which products round both."""
        operands, compute_dtype = [self.hidden, self.weight], _options.F32
        if torch.is_autocast_enabled(self.hidden.device.type):
            operands, compute_dtype = call.cast_by_autocast(*operands)
        return operands[0].reshape(-1, self.hidden.shape[-1]), operands[1], compute_dtype

    def _has_shared_list(self) -> bool:
        return self.offsets is None and self.ids.dim() == 1

    def _of_kernel(self) -> tuple[Any, ...]:
        """Returns the arguments of logits_of()."""
        o, (hidden, weight, compute_dtype) = self.o, self._operands()
        bias, row_temperature, numbers = o["bias"], self.row_temperature, self.numbers
        if self.learned:  # the kernel makes products alone
            bias, row_temperature, numbers = None, None, [_PRODUCTS[name] for name in LOGIT_NUMBERS]
        starts = None if self.offsets is None else self.offsets.long()
        integers = (o["ignore_id"], compute_dtype, _options.budget(o["max_workspace_bytes"]))
        lists = ListArguments(self.ids, starts, row_temperature, numbers, *integers)
        return hidden, weight, bias, lists, o["weight_gradient"] == "rows"

    def check_budget(self) -> None:
        """Raises BudgetTooSmallError unless the budget is enough for the lists, and for gradients that come later."""
        if self.o["max_workspace_bytes"] is not None and not self._has_shared_list():
            check_budget(*self._of_kernel())

    def logits(self) -> Tensor:
        """Returns the logits of all lists, without log_weights."""
        ids, is_sparse = self.ids, self.o["weight_gradient"] == "rows"
        if self._has_shared_list():
            flat, weight, compute_dtype = self._operands()
            dtype = DTYPES[compute_dtype]
            if compute_dtype == _options.F32:
                dtype = torch.promote_types(flat.dtype, weight.dtype)
            z = self._from_products(shared_logits(flat, weight, ids, dtype, is_sparse), ids)
            return z.reshape(self.shape)
        z = logits_of(*self._of_kernel())
        if self.learned:  # PyTorch differentiates what follows
            of_rows = ids.reshape(_shape_of_lists((math.prod(self.hidden.shape[:-1]),), ids, self.offsets))
            z = self._from_products(z.reshape(of_rows.shape), of_rows)
        return z.reshape(self.shape)

    def _from_products(self, products: Tensor, ids: Tensor) -> Tensor:
        """Returns logits of products of hidden states and weight, ``[N, K]`` or ``[E]``."""
        ignore_id, bias, vocab = self.o["ignore_id"], self.o["bias"], self.weight.shape[0]
        is_none, is_wrong = ids == ignore_id, wrong_ids(ids, vocab, ignore_id)
        scale, softcap, temperature = self.numbers
        z = products
        if self.learned:  # whose gradients are sums, which an infinite logit of no id would enter as 0 * inf
            z = z.masked_fill(is_none | is_wrong, 0)
        if "scale" in self.learned:
            z = self.learned["scale"] * z
        elif scale != 1:
            z = scale * z
        if bias is not None:
            places = ids.long().clamp(0, vocab - 1)
            z = z + torch.nn.functional.embedding(places, bias[:, None]).squeeze(-1).to(z.dtype)
        if softcap != 0:
            z = softcap * torch.tanh(z / softcap)
        if self.row_temperature is not None:
            rows = self.row_temperature.shape[0]
            lists = Lists((rows,), ids.shape[0] if self.offsets is not None else 0, self.offsets)
            z = z / lists.spread(torch.where(self.row_temperature > 0, self.row_temperature, math.nan))
        elif "temperature" in self.learned:
            is_excluded = z == -math.inf  # by a bias
            is_none, z = is_none | is_excluded, z.masked_fill(is_excluded, 0) / self.learned["temperature"]
        elif temperature != 1:
            z = z / temperature
        return z.masked_fill(is_wrong, math.nan).masked_fill(is_none, -math.inf)

    def output(
        self, z: Tensor, of_vocabulary: Callable[[Given], tuple[Tensor, Tensor | None]]
    ) -> LinearCandidatesOutput:
        """Returns the result from the logits of all lists. of_vocabulary: lse and entropy of each row over all ids."""
        o, offsets = self.o, self.offsets
        lists = Lists(self.hidden.shape[:-1], z.shape[0] if offsets is not None else 0, offsets)
        if o["log_weights"] is not None:
            z = z + o["log_weights"].to(z.dtype)
        if o["normalize"] == "candidates":
            lse = lists.logsumexp(z)
            entropy = _entropy(lists, z, lse) if o["return_entropy"] else None
        else:
            lse, entropy = of_vocabulary(self)
        output = LinearCandidatesOutput(_minus(lists, z, lse), lse, z, entropy)
        if o["targets"] is None:
            return output
        log_probs, loss = _of_targets(lists, self.ids, z, lse, o["targets"], o["ignore_index"], o["reduction"])
        return output._replace(target_log_probs=log_probs, loss=loss)


def checked(
    function: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    options: Mapping[str, Any],
    least_vocab: int = 1,
) -> Given:
    """Checks the arguments of linear_candidates. least_vocab: rows of the weight; a rank's shard may have none."""
    o = _options.filled(function, _options.names_of(CandidateOptions), options, _MORE)
    _options.budget(o["max_workspace_bytes"])
    o["ignore_index"] = _options.target_of_none(o["ignore_index"])
    indices = {"ids": ids, "offsets": offsets, "targets": o["targets"]}
    matrices = {"hidden": hidden, "weight": weight, "bias": o["bias"]}
    _check_tensors(matrices, indices, o["log_weights"], o["normalize"], least_vocab)
    _check_options(o)
    return Given(hidden, weight, ids, offsets, o, *_numbers(hidden, o))


def _shape_of_lists(rows: Sequence[int], ids: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    return tuple(ids.shape) if offsets is not None else (*rows, ids.shape[-1])


def wrong_ids(ids: Tensor, vocab: int, ignore_id: int) -> Tensor:
    """Returns where ids are out of range. On the CPU that is an error, except in compiled code."""
    is_wrong = (ids != ignore_id) & ((ids < 0) | (ids >= vocab))
    if not ids.is_cuda and not torch.compiler.is_compiling() and bool(is_wrong.any()):
        place = is_wrong.nonzero()[0].tolist()
        raise InvalidTargetError(
            f"ids: expected 0 <= id < {vocab} or ignore_id {ignore_id}, got {int(ids[tuple(place)])} at "
            f"ids{_options.shape_text(place)}"
        )
    return is_wrong


def _check_tensors(
    matrices: dict[str, Tensor | None],
    indices: dict[str, Tensor | None],
    log_weights: Tensor | None,
    normalize: str,
    least_vocab: int,
) -> None:
    """Checks all tensors but the temperature."""
    call.check_matrices(matrices, least_vocab)
    _options.check_float64(torch.float64, matrices)
    for name, tensor in indices.items():
        if tensor is not None or name == "ids":
            call.check_tensor(name, tensor)
            call.check_integers(name, cast(Tensor, tensor))
    hidden, ids = cast(Tensor, matrices["hidden"]), cast(Tensor, indices["ids"])
    rows, offsets, targets = hidden.shape[:-1], indices["offsets"], indices["targets"]
    if offsets is not None:
        call.check_shape("ids", ids, (ids.numel(),), "[E] with offsets")
        call.check_shape("offsets", offsets, (math.prod(rows) + 1,), "N + 1")
    elif ids.dim() != 1:
        shape = (*rows, ids.shape[-1] if ids.dim() > 0 else "K")
        _options.check_shape("ids", ids.shape, shape, "hidden without its last dimension, with K ids a row")
    if targets is not None:
        call.check_shape("targets", targets, rows, "hidden without its last dimension")
    if log_weights is not None:
        _check_log_weights(log_weights, _shape_of_lists(rows, ids, offsets), normalize)
    call.check_devices(hidden.device, matrices | indices | {"log_weights": log_weights})


def _check_log_weights(log_weights: Tensor, shape: tuple[int, ...], normalize: str) -> None:
    call.check_tensor("log_weights", log_weights)
    call.check_real("log_weights", log_weights)
    meaning = "that of log_probs; numbers for the whole vocabulary are passed as numbers[ids]"
    if tuple(log_weights.shape) != shape[-1:]:  # one list for all rows may have one list of numbers
        call.check_shape("log_weights", log_weights, shape, meaning)
    if normalize != "candidates":
        raise ValueError(
            f'log_weights: expected None unless normalize is "candidates", got a tensor with "{normalize}"'
        )


def _check_options(o: Mapping[str, Any]) -> None:
    normalize, weight_gradient = o["normalize"], o["weight_gradient"]
    _options.check_choice("normalize", normalize, NORMALIZE)
    _options.check_choice("weight_gradient", weight_gradient, WEIGHT_GRADIENTS)
    _options.check_choice("reduction", o["reduction"], _options.REDUCTIONS)
    _options.integer("ignore_id", o["ignore_id"])
    if weight_gradient == "rows" and normalize == "vocabulary":
        raise ValueError(
            'weight_gradient: expected "dense" with normalize="vocabulary", whose lse has all rows, got "rows"'
        )
    if weight_gradient == "rows" and torch.compiler.is_compiling():
        raise ValueError('weight_gradient: expected "dense" in compiled code, got "rows" (its size depends on the ids)')


def _numbers(hidden: Tensor, o: Mapping[str, Any]) -> tuple[Tensor | None, list[float], dict[str, Tensor]]:
    """Returns the temperatures of rows, if they are given, the numbers of all rows, and those that are learned."""
    rows, temperature, stats = hidden.shape[:-1], o["temperature"], stats_dtype(hidden)
    # torch.compile traces no name that a comprehension's condition assigns.
    tensors = {name: o[name] for name in ("scale", "temperature") if isinstance(o[name], Tensor)}
    learned = {
        name: call.scalar(name, value, learned=True)
        for name, value in tensors.items()
        if value.requires_grad and value.numel() == 1
    }
    call.check_devices(hidden.device, dict(learned))
    of_rows = None
    is_constant = isinstance(temperature, Tensor) and "temperature" not in learned
    if is_constant and temperature.dim() > 0 and temperature.shape == rows:
        hint = "one element may, one for each row is a constant"
        call.check_numbers("temperature", temperature, rows, "hidden without its last dimension", hint)
        call.check_devices(hidden.device, {"temperature": temperature})
        of_rows, temperature = temperature.to(stats).reshape(-1), 1.0
    given = {**o, "temperature": temperature}
    for name, value in learned.items():  # a compiled graph does not know a learned number
        given[name] = 1.0 if torch.compiler.is_compiling() else value.detach()
    numbers = {name: _number(name, given[name]) for name in LOGIT_NUMBERS}
    _check_range("temperature", numbers["temperature"], stats)
    if numbers["softcap"] != 0:
        _check_range("softcap", numbers["softcap"], stats, "0, or ")
    if not abs(numbers["scale"]) < math.inf:
        raise ValueError(f"scale: expected a finite number, got {numbers['scale']:g}")
    return of_rows, list(numbers.values()), learned


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        value = call.scalar(name, value).item()
    return 0.0 if value is None else float(_options.number(name, value))


def _check_range(name: str, value: float, stats: torch.dtype, before: str = "") -> None:
    """Checks a divisor, which has a limit that keeps float32 factors finite."""
    least, most, text = (0.0, math.inf, "a finite number > 0")
    if stats == torch.float32:
        least, most, text = 2.0**-126, 2.0**126, "a number in [2^-126, 2^126]"
    if not (0 < value < math.inf and least <= value <= most):
        raise InvalidArgumentError(f"{name}: expected {before}{text}, got {value:g}")


def of_vocabulary(given: Given, function: Callable[..., Any], **more: Any) -> tuple[Tensor, Tensor | None]:
    """Returns lse and entropy of each row over all columns. function: linear_cross_entropy, of a group or not."""
    options = {name: given.o[name] for name in _options.TOP_K_OPTIONS} | more
    any_target = torch.zeros(given.hidden.shape[:-1], dtype=torch.int64, device=given.hidden.device)
    names = ("lse", "entropy") if given.o["return_entropy"] else ("lse",)
    stats = function(given.hidden, given.weight, any_target, reduction="none", return_stats=names, **options)
    return stats.lse, stats.entropy


def _of_vocabulary(given: Given) -> tuple[Tensor, Tensor | None]:
    return of_vocabulary(given, linear_cross_entropy)


def _minus(lists: Lists, z: Tensor, lse: Tensor) -> Tensor:
    """Returns z - lse, which is -inf for z = -inf, also in a row without candidates."""
    of_rows = lists.spread(torch.where(lse == -math.inf, 0, lse))
    return torch.where(z == -math.inf, -math.inf, z - of_rows)


def _times(weights: Tensor, values: Tensor) -> Tensor:
    """Returns weights * values with 0 * inf = 0, also in gradients."""
    is_none = weights == 0
    return torch.where(is_none, 0, weights * torch.where(is_none, 0, values))


def _entropy(lists: Lists, z: Tensor, lse: Tensor) -> Tensor:
    log_probs = _minus(lists, z, lse)
    return -lists.sum(_times(log_probs.exp(), log_probs))


def _of_targets(
    lists: Lists, ids: Tensor, z: Tensor, lse: Tensor, targets: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor]:
    """Returns the targets' log-probabilities, 0 for no target, and the loss."""
    is_row = targets != ignore_index
    is_target = ids == lists.spread(targets)
    of_target = lists.logsumexp(torch.where(is_target, z, -math.inf))
    is_absent = of_target == -math.inf
    log_probs = torch.where(is_absent, -math.inf, of_target - torch.where(is_absent, 0, lse))
    log_probs = torch.where(is_row, log_probs, 0)
    if reduction == "none":
        return log_probs, -log_probs
    loss = -log_probs.sum()
    return log_probs, loss / is_row.sum() if reduction == "mean" else loss


# ---- losses


def _lists_of(log_probs: Tensor, offsets: Tensor | None) -> Lists:
    call.check_tensor("log_probs", log_probs)
    if offsets is None:
        return Lists(log_probs.shape[:-1], 0, None)
    call.check_integers("offsets", offsets)
    return Lists((offsets.shape[0] - 1,), log_probs.shape[0], offsets)


def _log_rest(lists: Lists, log_probs: Tensor) -> Tensor:
    """Returns log(1 - sum of probabilities) of each row; at least the logarithm of a rounding unit."""
    unit = torch.finfo(log_probs.dtype).eps
    sum_of_logs = lists.logsumexp(log_probs).clamp(max=-unit)
    near = sum_of_logs > -math.log(2)
    # Both forms are made for all rows, each with numbers that suit it: gradients of the other one stay finite.
    log_of_small = torch.log(-torch.expm1(torch.where(near, sum_of_logs, -unit)))
    log_of_large = torch.log1p(-torch.exp(torch.where(near, -1.0, sum_of_logs)))
    return torch.where(near, log_of_small, log_of_large)


def soft_cross_entropy(
    log_probs: Tensor,
    target_probs: Tensor,
    offsets: Tensor | None = None,
    *,
    renormalize: bool = False,
    other: bool = False,
) -> Tensor:
    """Cross entropy of each row with soft targets q over its candidates: ``-sum_k q_k log p_k``.

    Args:
        log_probs: log p, of :func:`linear_candidates`.
        target_probs: q, of the same shape; constants, such as a teacher's largest probabilities.
        offsets: Where lists begin, as in :func:`linear_candidates`.
        renormalize: Divides q by its sum over the row.
        other: Adds all other ids as one more class with the probabilities ``1 - sum q`` and ``1 - sum p``:
            ``- (1 - sum q) log(1 - sum p)``. It needs log-probabilities over the vocabulary, and lists without
            repeated ids. ``1 - sum p`` is taken as at least a rounding unit.

    Returns:
        One number for each row.
    """
    lists = _lists_of(log_probs, offsets)
    q = _probs_of("target_probs", target_probs, log_probs)
    total = lists.sum(q)
    if renormalize:
        q = q / lists.spread(torch.where(total == 0, 1, total))
    loss = -lists.sum(_times(q, log_probs))
    if not other:
        return loss
    if renormalize:
        raise ValueError("renormalize: expected False with other, got True (the rest of q has a class of its own)")
    return loss - (1 - total).clamp(min=0) * _log_rest(lists, log_probs)


def forward_kl(
    log_probs: Tensor, target_log_probs: Tensor, offsets: Tensor | None = None, *, other: bool = False
) -> Tensor:
    """Divergence KL(q || p) of each row over its candidates: ``sum_k q_k (log q_k - log p_k)``.

    Args:
        log_probs: log p, of :func:`linear_candidates`.
        target_log_probs: log q, of the same shape, constant; -inf where q is 0.
        offsets: Where lists begin, as in :func:`linear_candidates`.
        other: Adds all other ids as one more class, as in :func:`soft_cross_entropy`.

    Returns:
        One number for each row.
    """
    return generalized_jsd(log_probs, target_log_probs, offsets, beta=0.0, other=other)


def reverse_kl(
    log_probs: Tensor, target_log_probs: Tensor, offsets: Tensor | None = None, *, other: bool = False
) -> Tensor:
    """Divergence KL(p || q) of each row over its candidates: ``sum_k p_k (log p_k - log q_k)``.

    It is infinite where q is 0 and p is not. Arguments and result are those of :func:`forward_kl`.
    """
    return generalized_jsd(log_probs, target_log_probs, offsets, beta=1.0, other=other)


def generalized_jsd(
    log_probs: Tensor,
    target_log_probs: Tensor,
    offsets: Tensor | None = None,
    *,
    beta: float = 0.5,
    other: bool = False,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of each row over its candidates, with ``m = (1 - beta) p + beta q``.

    It is ``beta KL(q || m) + (1 - beta) KL(p || m)``, or at the ends ``KL(q || p)`` for 0 and ``KL(p || q)`` for 1, as
    in :func:`logitless.linear_divergence`. Other arguments and the result are those of :func:`forward_kl`.

    Args:
        log_probs: log p.
        target_log_probs: log q.
        offsets: Where lists begin.
        beta: 0, or a number in [2^-100, 1].
        other: Adds all other ids as one more class.
    """
    if not (beta == 0 or 2.0**-100 <= beta <= 1):
        raise InvalidArgumentError(f"beta: expected 0, or a number in [2^-100, 1], got {beta}")
    lists = _lists_of(log_probs, offsets)
    log_q = _probs_of("target_log_probs", target_log_probs, log_probs)
    loss = lists.sum(_divergence_terms(log_probs, log_q, beta))
    return loss + _divergence_terms(_log_rest(lists, log_probs), _log_rest(lists, log_q), beta) if other else loss


def _divergence_terms(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Returns the terms of a divergence whose sum over ids is that of a row; 0 where neither p nor q is positive."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return _times(q, log_q - log_p)
    if beta == 1:
        return _times(p, log_p - log_q)
    is_none = (p == 0) & (q == 0)
    log_p, log_q = (torch.where(is_none, 0, values) for values in (log_p, log_q))
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return beta * _times(q, log_q - log_m) + (1 - beta) * _times(p, log_p - log_m)


def _probs_of(name: str, values: Tensor, log_probs: Tensor) -> Tensor:
    call.check_tensor(name, values)
    call.check_shape(name, values, log_probs.shape, "that of log_probs")
    call.check_constant(name, values, "targets are constants")
    return values.to(log_probs.dtype)
