"""``logitless.sample``: ids sampled from a head's softmax, without its logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import call
from . import options as _options
from ._candidates.operators import ListArguments, dense_logits, logits_of
from ._sampling.edits import Edits, are_set, distinct, largest_of_all, logits_from, packed, unpacked, winners, without
from ._sampling.edits import entropy as entropy_of_all
from ._sampling.operators import Pass, SampleRun, find, reads
from ._sampling.operators import sample as _run
from ._sampling.truncation import Drawn, Truncation, Wanted, draw
from .candidates import _numbers
from .errors import InvalidArgumentError
from .native import Cache
from .options import LOGIT_NUMBERS, MOST_TOP_K, TopKOptions, accepts
from .run import DTYPES, stats_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import Seed

__all__ = ["KeptIds", "SampleOutput", "sample"]

OF_SETS = ("top_k", "top_p", "min_p", "mask", "penalties")  # options of truncated and edited distributions
MOST_SAMPLES = 64  # of num_samples in options.def
_EXACT_BYTES = 256 << 20  # of the logits of rows that are done again, and of what a sort of them needs
_BYTES_OF_LOGIT = 128  # about 16 arrays of float64
_CAST_BYTES = 32 << 20  # of the weight in another dtype, for these logits


class KeptIds(NamedTuple):
    """The ids that samples were drawn from, row after row, in descending order of probability."""

    offsets: Tensor  # [N + 1] int64
    ids: Tensor  # [E] int64
    log_probs: Tensor  # [E] of the sampled distribution


class SampleOutput(NamedTuple):
    """The result of :func:`sample`. Nothing has a gradient.

    Attributes:
        ids: ``[..., S]``, int64; -1 in a row with NaN or +inf, or without any finite logit.
        log_probs: Of the distribution that was sampled: truncated, masked and penalized. None unless requested.
        full_log_probs: Of the head's softmax at the temperature, which a trainer computes. None unless requested.
        entropy: ``[...]``, of the distribution that was sampled. None unless requested.
        kept: The ids that were left by truncation and mask. None unless requested.
    """

    ids: Tensor
    log_probs: Tensor | None = None
    full_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    kept: KeptIds | None = None


class SampleOptions(TopKOptions, total=False):
    num_samples: int
    seed: Seed
    top_k: int | None
    top_p: float | None
    min_p: float | None
    mask: Tensor | None
    penalties: tuple[Tensor, Tensor] | None
    return_logprobs: bool
    return_entropy: bool
    return_kept: bool


_MORE: dict[str, Any] = {"num_samples": 1, "seed": None, "temperature": 1.0, "top_k": None, "top_p": None}
_MORE |= {"min_p": None, "bias": None, "scale": 1.0, "softcap": None, "mask": None, "penalties": None}
_MORE |= {"return_logprobs": False, "return_entropy": False, "return_kept": False}


accepts_samples = accepts(SampleOptions, tuple(_MORE), **_MORE)


@accepts_samples
def sample(hidden: Tensor, weight: Tensor, **options: Unpack[SampleOptions]) -> SampleOutput:
    """Samples ids from the softmax of a head's logits, which are not stored.

    An id's key is ``z_ij - log E_ij``, where E are independent exponential numbers, and the largest key wins. So one
    pass is enough, and ids have exactly the probabilities of the softmax. E depends on the seed, the row, the number of
    the sample and the id alone.

    Args:
        hidden: Hidden states, ``[..., D]``, in float32, bfloat16, float16, or float64 on the CPU.
        weight: The head's weight, ``[V, D]``.
        num_samples: Number of ids a row, up to 64, each drawn on its own.
        seed: An integer, a tensor with one int64 element or one for each row (of the shape ``hidden.shape[:-1]``), a
            generator on the device of ``hidden``, or None for PyTorch's default generator. A row with its own seed has
            the same samples in any batch and place: those that row 0 has with this seed.
        temperature: Divisor of the logits after the softcap: a number, or one for each row of the shape
            ``hidden.shape[:-1]``.
        top_k: Keeps this many of the most probable ids; of equal ones the smaller. None keeps all.
        top_p: Keeps the fewest most probable ids of those left whose probabilities sum to at least this share.
        min_p: Keeps ids whose probability is at least this share of the largest.
        bias: Added to the logits, ``[V]``.
        scale: Factor of the logits before bias and softcap.
        softcap: Bound of the logits. None or 0 means no bound.
        mask: Ids that may be sampled: a bool tensor ``[..., V]``, or bits ``[..., ceil(V / 32)]`` in int32, of which
            the lowest of a word is that of its first id.
        penalties: Ids ``[..., K]`` and numbers ``[..., K]`` that are added to their logits before the temperature
            divides them. An id of -1 stands for none.
        return_logprobs: Whether both kinds of log-probabilities are returned.
        return_entropy: Whether the entropy of the sampled distribution is returned.
        return_kept: Whether the kept ids are returned; only with one of ``top_k``, ``top_p``, ``min_p``, ``mask`` and
            ``penalties``.
        max_workspace_bytes: As in :func:`logitless.linear_cross_entropy`, for each pass. Masks as bits, and numbers of
            penalized ids, come beside it. Rows that are done again take about ``128 V`` bytes each, as many at a time
            as 256 MiB hold, and 32 MiB for a part of the weight in another dtype.

    Returns:
        A :class:`SampleOutput`.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or range.
        BudgetTooSmallError: No plan fits ``max_workspace_bytes``.

    A pass leaves masked and penalized ids out. The logits of penalized ids are made by themselves, as
    :func:`logitless.linear_candidates` makes them. ``full_log_probs`` beside a mask or penalties take a pass of their
    own.

    Truncated rows come from the 64 largest logits where these are sure to hold the set. Other rows are done again with
    all of their logits, so sets are never approximated. This makes the host wait for the device, except with ``top_k``
    up to 64 and without ``top_p``. Greedy decoding is :func:`logitless.linear_top_k` with ``k=1``.
    """
    return Given(hidden, weight, options).sample()


class _Checked:
    """All that does not depend on data. It is made from a call's arguments, which it checks, and keeps no tensor."""

    def __init__(self, hidden: Tensor, weight: Tensor, o: Mapping[str, Any], least_vocab: int) -> None:
        matrices = {"hidden": hidden, "weight": weight, "bias": o["bias"]}
        call.check_matrices(matrices, least_vocab)
        _options.check_float64(torch.float64, matrices)
        call.check_devices(hidden.device, matrices)
        self.count = _options.integer("num_samples", o["num_samples"])
        if not 1 <= self.count <= MOST_SAMPLES:
            raise InvalidArgumentError(f"num_samples: expected a number in [1, {MOST_SAMPLES}], got {self.count}")
        for name in ("return_logprobs", "return_entropy", "return_kept"):
            _options.flag(name, o[name])
        row_temperature, self.numbers, learned = _numbers(hidden, o)
        self.has_row_temperature = row_temperature is not None
        for name, value in learned.items():
            self.numbers[LOGIT_NUMBERS.index(name)] = float(value.detach())
        self.truncation = _truncation(o, weight.shape[0])
        if o["mask"] is not None:
            _check_mask(o["mask"], hidden, weight.shape[0])
        if o["return_kept"] and all(o[name] is None for name in OF_SETS):
            raise ValueError(f"return_kept: expected False without {', '.join(OF_SETS)}, got True")
        self.budget = _options.budget(o["max_workspace_bytes"])
        _check_seed(o["seed"], hidden)
        self.stats = stats_dtype(hidden)
        self.runs: dict[Any, SampleRun] = {}  # by passes, and whether they have a mask


_checked: Cache[Any, _Checked] = Cache(256)
_DEFAULTS = _options.DEFAULTS | _MORE
_OPTIONS = _options.names_of(SampleOptions)


def _is_plain(hidden: Tensor, weight: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether nothing in PyTorch watches the call, and all of its tensors are plain ones."""
    if not call.are_off() or hidden is None or weight is None:
        return False
    tensors = [hidden, weight, *[value for value in options.values() if isinstance(value, Tensor)]]
    penalties = options.get("penalties")
    return call.are_plain([*tensors, *penalties] if isinstance(penalties, (tuple, list)) else tensors)


def _key(hidden: Tensor, weight: Tensor, options: Mapping[str, Any], least_vocab: int) -> Any:
    """As key_of()."""
    temperature = options.get("temperature")
    if isinstance(temperature, Tensor) and (
        temperature.requires_grad or temperature.dim() == 0 or temperature.shape != getattr(hidden, "shape", ())[:-1]
    ):
        return None  # it has a number
    names = ("bias", "mask", "seed", "temperature")
    return call.key_of(f"sample of {least_vocab}", (hidden, weight), options, names, ("seed",))


class Given:
    """The checked arguments of a call. least_vocab: rows of the weight; a rank's shard may have none."""

    def __init__(self, hidden: Tensor, weight: Tensor, options: Mapping[str, Any], least_vocab: int = 1) -> None:
        key = _key(hidden, weight, options, least_vocab)
        self.is_plain = key is not None or _is_plain(hidden, weight, options)
        checked = None if key is None else _checked.get(key)
        o = self.o = {**_DEFAULTS, **options}
        if checked is None:
            _options.check_names("sample", options, _OPTIONS)
            checked = _Checked(hidden, weight, o, least_vocab)
            if key is not None:
                _checked.put(key, checked)
        elif not isinstance(o["seed"], Tensor):
            _check_seed(o["seed"], hidden)
        self.checked, self.rows, self.vocab = checked, hidden.shape[:-1], weight.shape[0]
        self.count, self.truncation = checked.count, checked.truncation
        self.numbers: list[float] = checked.numbers
        self.budget, self.stats, self.compute_dtype = checked.budget, checked.stats, _options.F32
        is_flat = len(self.rows) == 1
        self.row_temperature: Tensor | None = None
        if checked.has_row_temperature:
            temperature = o["temperature"].to(self.stats)
            self.row_temperature = temperature if is_flat else temperature.reshape(-1)
        self.mask: Tensor | None = o["mask"]
        if self.mask is not None:
            mask = self.mask if is_flat else self.mask.reshape(self.rows.numel(), self.mask.shape[-1])
            self.mask = packed(mask) if mask.dtype == torch.bool else mask
        self.penalties = None
        if o["penalties"] is not None:
            self.penalties = _checked_penalties(o["penalties"], hidden)
        self.is_edited = self.mask is not None or self.penalties is not None
        self.seed = _seed(o["seed"], hidden)
        operands, bias = [each.detach() if each.requires_grad else each for each in (hidden, weight)], o["bias"]
        if torch.is_autocast_enabled(hidden.device.type):
            operands, self.compute_dtype = call.cast_by_autocast(*operands)
        self.hidden = operands[0] if is_flat else operands[0].reshape(-1, hidden.shape[-1])
        self.weight, self.bias = operands[1], bias if bias is None or not bias.requires_grad else bias.detach()

    def sample(self) -> SampleOutput:
        if self.penalties is not None:
            self._check_ids(self.penalties[0])
        if self.truncation.is_none() and not self.o["return_kept"]:
            return self._whole()
        return self._of_sets()

    def _check_ids(self, ids: Tensor) -> None:
        is_wrong = (ids < -1) | (ids >= self.vocab)
        if bool(is_wrong.any()):
            row, place = is_wrong.nonzero()[0].tolist()
            raise InvalidArgumentError(
                f"penalties[0]: expected ids in [0, {self.vocab}) or -1, got {int(ids[row, place])} in row {row}"
            )

    # ---- passes over all ids, of which distributed/_sampling.py has some on other ranks

    def _samples(self, bits: Tensor | None, merges: bool) -> Any:
        """Returns ids, log-probabilities, keys, lse and entropy of samples of the ids with these bits."""
        return self.run([], bits, merges=merges)

    def _largest(self, bits: Tensor | None, count: int, merges: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids and log-probabilities of the largest logits with these bits, and their lse."""
        ids, log_probs, _, lse, _ = self.run([], bits, 0, count, merges)
        return ids, log_probs, lse

    def _lse_of_all(self) -> Tensor:
        """The lse of each row without mask and penalties, ``[N, 1]``."""
        lse: Tensor = self.run([], count=0)[3]
        return lse.double()[:, None]

    def _logits_of(self, ids: Tensor) -> Tensor:
        """Returns logits in float64 of ids of each row, of -inf for -1."""
        integers = (-1, self.compute_dtype, self.budget)
        lists = ListArguments(ids, None, self.row_temperature, self.numbers, *integers)
        return logits_of(self.hidden, self.weight, self.bias, lists, False).reshape(ids.shape).double()

    def _are_allowed(self, bits: Tensor, ids: Tensor) -> Tensor:
        return are_set(bits, ids)

    def _in_weight(self, ids: Tensor) -> Tensor:
        """Returns the rows of the weight that ids have, -1 for others."""
        return ids

    def _allowed(self, rows: Tensor) -> Tensor | None:
        """Returns the mask of rows, ``[R, V]``; None for none."""
        return None if self.mask is None else unpacked(self.mask[rows], self.weight.shape[0])

    # ---- the whole softmax

    def _whole(self) -> SampleOutput:
        bits, edits = self._edits()
        merges = edits is not None or (self.is_edited and self.o["return_logprobs"])
        ids, log_probs, keys, lse, entropy = self._samples(bits, merges)
        if not merges:
            return self.output(ids, log_probs, entropy)
        of_row = lse.double()[:, None]
        z = unedited = logits_from(log_probs, of_row)
        if edits is not None:
            edited = edits.of(self._logits_of(edits.ids))
            ids, z, unedited, total = winners(ids, keys, z, of_row, edited, self.seed)
            log_probs = (z - total).to(self.stats)
            if self.o["return_entropy"]:
                entropy = entropy_of_all(entropy, of_row, edited, total).to(self.stats)
        full = (unedited - self._lse_of_all()).to(self.stats) if self.o["return_logprobs"] else log_probs
        return self.output(ids, log_probs, entropy, full.masked_fill(log_probs.isnan(), math.nan))

    def _edits(self) -> tuple[Tensor | None, Edits | None]:
        """Returns the bits of ids whose logits are as they are (None: all), and the others."""
        if self.penalties is None or self.penalties[0].shape[1] == 0:
            return self.mask, None
        ids, values = distinct(self.penalties[0], torch.where(self.penalties[0] < 0, 0, self.penalties[1].double()))
        bits = self.mask
        if bits is None:
            bits = ids.new_full((ids.shape[0], -(-self.weight.shape[0] // 32)), -1, dtype=torch.int32)
        added = values / self._divisor(torch.arange(len(ids), device=ids.device))
        rows = self._in_weight(ids)
        return without(bits, rows), Edits(ids, added, self._are_allowed(bits, rows))

    def run(
        self,
        shard: Sequence[int],
        mask: Tensor | None = None,
        count: int | None = None,
        largest: int = 0,
        merges: bool = True,
    ) -> Any:
        """Runs a pass, through the operator unless the call is plain. Then results that are not wanted may be None.

        count: samples of a row; largest: without them, the number of its largest logits. merges: as in Pass.
        """
        samples, entropy = (self.count, self.o["return_entropy"]) if count is None else (count, False)
        tensors = self.hidden, self.weight, self.bias, self.row_temperature, self.seed
        numbers, last = self.numbers, (self.compute_dtype, self.budget)
        if not self.is_plain:
            return _run(*tensors, numbers, samples, entropy, list(shard), *last, mask, largest)
        of = Pass(tuple(numbers), samples, entropy, tuple(shard), *last, largest, merges)
        read, key = reads(of, *tensors, mask), (of, mask is None)
        run = self.checked.runs.get(key)
        if run is None:
            run = self.checked.runs[key] = find(of, read)
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function("logitless::sample"):
                return run(read)
        return run(read)

    def output(
        self, ids: Tensor, log_probs: Tensor, entropy: Tensor | None, full: Tensor | None = None
    ) -> SampleOutput:
        """Returns the result of the whole softmax, from rows of the flat call. full: None for log_probs."""
        has_log_probs, has_entropy = self.o["return_logprobs"], self.o["return_entropy"]
        ids.masked_fill_(log_probs != log_probs, -1)  # NaN
        if len(self.rows) != 1:
            ids, log_probs = (each.reshape(*self.rows, self.count) for each in (ids, log_probs))
        return SampleOutput(
            ids,
            log_probs if has_log_probs else None,
            (log_probs.clone() if full is None else full.reshape(ids.shape)) if has_log_probs else None,
            entropy.reshape(self.rows) if has_entropy and entropy is not None else None,
        )

    # ---- sets of ids

    def _of_sets(self) -> SampleOutput:
        tokens, device, stats = self.hidden.shape[0], self.hidden.device, self.stats
        parts: list[tuple[Tensor, Drawn]] = []
        again = torch.arange(tokens, device=device)
        if tokens > 0 and self.truncation.may_be_held(self._largest_count(), self.vocab):
            held, drawn = self._from_largest(again)
            parts.append((again if held is None else again[held], drawn))
            again = again[:0] if held is None else again[~held]
        at_once = max(1, _EXACT_BYTES // (_BYTES_OF_LOGIT * self.vocab))
        for start in range(0, len(again), at_once):
            some = again[start : start + at_once]
            parts.append((some, self._from_all(some)))
        order = torch.cat([rows for rows, _ in parts] or [again])

        def joined(field: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            if len(parts) == 1:  # all rows in their order
                of_all: Tensor = getattr(parts[0][1], field)
                return of_all.to(dtype)
            out = torch.empty((tokens, *shape), dtype=dtype, device=device)
            if parts:
                out[order] = torch.cat([getattr(drawn, field) for _, drawn in parts]).to(dtype)
            return out

        def of_samples(field: str, dtype: torch.dtype) -> Tensor:
            return joined(field, (self.count,), dtype).reshape(*self.rows, self.count)

        o = self.o
        has_log_probs = o["return_logprobs"]
        return SampleOutput(
            of_samples("ids", torch.int64),
            of_samples("log_probs", stats) if has_log_probs else None,
            of_samples("full_log_probs", stats) if has_log_probs else None,
            joined("entropy", (), stats).reshape(self.rows) if o["return_entropy"] else None,
            _kept(parts, order, joined("counts", (), torch.int64), stats) if o["return_kept"] else None,
        )

    def _drawn(self, rows: Tensor, ids: Tensor, log_probs: Tensor, full: Tensor, keeps: Tensor) -> Drawn:
        seed = self.seed[rows] if self.seed.dim() > 0 else self.seed
        wanted = Wanted(*(self.o[f"return_{name}"] for name in ("logprobs", "entropy", "kept")))
        return draw(ids, log_probs, full, keeps, seed, rows, self.count, wanted)

    def _largest_count(self) -> int:
        top_k = self.truncation.top_k
        return min(top_k if 0 < top_k <= MOST_TOP_K else MOST_TOP_K, self.vocab)

    def _from_largest(self, rows: Tensor) -> tuple[Tensor | None, Drawn]:
        """Returns the rows whose largest logits hold the set, as a mask (None: all), and their samples."""
        bits, edits = self._edits()
        count, vocab = self._largest_count(), self.vocab
        is_sure, needs_full = self.truncation.is_sure(count, vocab), self.is_edited and self.o["return_logprobs"]
        merges = not is_sure or needs_full or edits is not None
        ids, log_probs, lse = self._largest(bits, count, merges)
        full = log_probs = log_probs.double()
        if merges:
            of_row = lse.double()[:, None]
            unedited = logits_from(log_probs, of_row)
            if edits is not None:
                # One call makes all of these logits, so that equal rows of the weight have equal ones.
                z = self._logits_of(torch.cat((ids, edits.ids), -1))
                unedited = torch.where(unedited.isfinite(), z[:, : ids.shape[1]], unedited)
                ids, z, unedited, of_row = largest_of_all(ids, unedited, of_row, edits.of(z[:, ids.shape[1] :]))
                log_probs = z - of_row
            full = unedited - self._lse_of_all() if needs_full else log_probs
        if is_sure:
            return None, self._drawn(rows, ids, log_probs, full, self.truncation.kept(log_probs))
        is_empty = of_row[:, 0] == -math.inf  # by its mask
        held = self.truncation.is_held(log_probs, vocab) | is_empty
        log_probs = log_probs[held]
        return held, self._drawn(rows[held], ids[held], log_probs, full[held], self.truncation.kept(log_probs))

    def _from_all(self, rows: Tensor) -> Drawn:
        """Samples from all logits of these rows."""
        z = self._logits(rows)
        full = z.log_softmax(-1)
        edited = self._edited(z, rows).log_softmax(-1) if self.is_edited else full
        log_probs, ids = edited.sort(stable=True, dim=-1, descending=True)
        full = full.gather(-1, ids) if self.is_edited else log_probs
        keeps = self.truncation.kept(log_probs)
        width = max(1, int(keeps.sum(-1).max()))  # the kept ones come first
        return self._drawn(rows, *(each[:, :width] for each in (ids, log_probs, full, keeps)))

    def _divisor(self, rows: Tensor) -> Tensor | float:
        if self.row_temperature is None:
            return self.numbers[LOGIT_NUMBERS.index("temperature")]
        divisor = self.row_temperature[rows, None].double()
        most = 2.0**126 if self.stats == torch.float32 else 2.0**1022
        return divisor.where((divisor >= 1 / most) & (divisor <= most), math.nan)  # as the library's results

    def _logits(self, rows: Tensor) -> Tensor:
        """Returns all logits of rows, ``[R, V]``, in float64 after the products."""
        hidden, weight = self.hidden[rows], self.weight
        dtype = DTYPES[self.compute_dtype]
        if self.compute_dtype == _options.F32:
            dtype = torch.promote_types(hidden.dtype, weight.dtype)
        # CPUs multiply in float32, and other dtypes are rounded first: a slice of the weight at a time.
        at_once = max(1, _CAST_BYTES // (8 * weight.shape[1]))
        parts = weight.split(at_once)  # type: ignore[no-untyped-call]
        z = torch.cat([dense_logits(hidden, part, dtype) for part in parts], -1).double()
        numbers = dict(zip(LOGIT_NUMBERS, self.numbers))
        z = z * numbers["scale"]
        if self.bias is not None:
            z += self.bias.double()
        if numbers["softcap"]:
            z = numbers["softcap"] * torch.tanh(z / numbers["softcap"])
        return z / self._divisor(rows)

    def _edited(self, z: Tensor, rows: Tensor) -> Tensor:
        if self.penalties is not None:
            ids, values = (each[rows] for each in self.penalties)
            ids, added = distinct(ids, torch.where(ids < 0, 0, values.double()))  # as in _edits()
            z = z.scatter_add(-1, ids.clamp(min=0), torch.where(ids < 0, 0, added / self._divisor(rows)))
        allowed = self._allowed(rows)
        return z if allowed is None else z.masked_fill(~allowed, -math.inf)


def _truncation(o: Mapping[str, Any], vocab: int) -> Truncation:
    top_k, top_p, min_p = o["top_k"], o["top_p"], o["min_p"]
    if top_k is not None:
        top_k = _options.integer("top_k", top_k)
        if top_k < 1:
            raise InvalidArgumentError(f"top_k: expected None or a number of at least 1, got {top_k}")
    for name, value, is_open in (("top_p", top_p, True), ("min_p", min_p, False)):
        if value is None:
            continue
        number = _options.number(name, value)
        if not (0 < number <= 1 or (number == 0 and not is_open)):
            raise InvalidArgumentError(
                f"{name}: expected None or a number in {'(' if is_open else '['}0, 1], got {number}"
            )
    kept = 0 if top_k is None or top_k >= vocab else top_k
    return Truncation(kept, 1.0 if top_p is None else float(top_p), 0.0 if min_p is None else float(min_p))


def _check_mask(mask: Any, hidden: Tensor, vocab: int) -> None:
    call.check_tensor("mask", mask)
    if mask.dtype not in (torch.bool, torch.int32):
        raise TypeError(f"mask: expected bool [..., V] or int32 bits [..., ceil(V / 32)], got {mask.dtype}")
    columns = vocab if mask.dtype == torch.bool else -(-vocab // 32)
    call.check_shape("mask", mask, (*hidden.shape[:-1], columns), "hidden without its last dimension, and all ids")
    call.check_devices(hidden.device, {"mask": mask})


def _checked_penalties(penalties: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(penalties, (tuple, list)) or len(penalties) != 2:
        raise TypeError(f"penalties: expected a pair of ids and numbers, got {type(penalties).__name__}")
    ids, values = penalties
    for name, tensor in (("penalties[0]", ids), ("penalties[1]", values)):
        call.check_tensor(name, tensor)
        shape = (*hidden.shape[:-1], tensor.shape[-1] if tensor.dim() > 0 else "K")
        _options.check_shape(name, tensor.shape, shape, "hidden without its last dimension, with K ids a row")
    call.check_integers("penalties[0]", ids)
    call.check_real("penalties[1]", values)
    call.check_shape("penalties[1]", values, ids.shape, "that of penalties[0]")
    call.check_devices(hidden.device, {"penalties[0]": ids, "penalties[1]": values})
    flat = (hidden.shape[:-1].numel(), ids.shape[-1])
    return ids.reshape(flat).long(), values.detach().reshape(flat)


def _is_of_rows(seed: Any, hidden: Tensor) -> bool:
    return isinstance(seed, Tensor) and seed.dim() > 0 and seed.shape == hidden.shape[:-1]


def _check_seed(seed: Any, hidden: Tensor) -> None:
    if not _is_of_rows(seed, hidden):
        return call.check_seed(seed, hidden.device)
    call.check_tensor("seed", seed)
    if seed.dtype != torch.int64:
        raise ValueError(f"seed: expected int64 seeds of rows, got {seed.dtype}")
    call.check_devices(hidden.device, {"seed": seed})


def _seed(seed: Any, hidden: Tensor) -> Tensor:
    """Returns a scalar, or one seed of each row."""
    return seed.reshape(-1) if _is_of_rows(seed, hidden) else call.seed_tensor(seed, hidden.device)


def _kept(parts: Sequence[tuple[Tensor, Drawn]], order: Tensor, counts: Tensor, stats: torch.dtype) -> KeptIds:
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    row = order.repeat_interleave(counts[order])
    place = row.argsort(stable=True)

    def ordered(field: str, dtype: torch.dtype) -> Tensor:
        empty = torch.empty(0, dtype=dtype, device=order.device)
        return torch.cat([getattr(drawn, field).to(dtype) for _, drawn in parts] or [empty])[place]

    return KeptIds(offsets, ordered("kept_ids", torch.int64), ordered("kept_log_probs", stats))
