"""Masks and penalties: the bits of a mask, and the few logits that penalties edit.

A pass masks the edited ids, too. So what it finds and the edited logits share no id, and are merged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import noise


def packed(mask: Tensor) -> Tensor:
    """Returns the bits of a mask of bools ``[N, V]``, ``[N, ceil(V / 32)]``."""
    rows, vocab = mask.shape
    words = -(-vocab // 32)
    if mask.numel() == 0:  # such a tensor cannot be viewed as words
        return mask.new_zeros((rows, words), dtype=torch.int32)
    bools = torch.nn.functional.pad(mask.to(torch.uint8), (0, 32 * words - vocab)).reshape(rows, 4 * words, 8)
    octets = bools[..., 0].clone(memory_format=torch.contiguous_format)
    for place in range(1, 8):
        octets |= bools[..., place] << place
    return octets.view(torch.int32)


def unpacked(bits: Tensor, vocab: int) -> Tensor:
    bools = bits[..., None] >> torch.arange(32, dtype=torch.int32, device=bits.device) & 1
    return bools.flatten(1)[:, :vocab].bool()


def without(bits: Tensor, ids: Tensor) -> Tensor:
    """Clears the bits of distinct ids ``[N, K]``; -1 is none."""
    if bits.shape[1] == 0:
        return bits
    bit = torch.where(ids < 0, 0, torch.ones_like(ids) << (ids & 31)).int()
    return bits & ~torch.zeros_like(bits).scatter_add(-1, ids.clamp(min=0) >> 5, bit)


def are_set(bits: Tensor, ids: Tensor) -> Tensor:
    """Returns the bits of ids; false for -1."""
    if bits.shape[1] == 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    return ((bits.gather(-1, ids.clamp(min=0) >> 5) >> (ids & 31).int()) & 1).bool() & (ids >= 0)


def distinct(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's ids once, with -1 behind them, and the sums of their numbers."""
    ids, order = ids.sort(stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = is_first.cumsum(-1) - 1
    sums = torch.zeros_like(values).scatter_add(-1, place, values.gather(-1, order))
    return torch.full_like(ids, -1).scatter(-1, place, ids), sums


class Edited(NamedTuple):
    """The ids that penalties edit, ``[N, K]``, with logits in float64 of -inf where an id is -1 or masked."""

    ids: Tensor
    z: Tensor
    unedited: Tensor  # without penalties


class Edits(NamedTuple):
    """The ids that penalties edit, ``[N, K]``, what is added to their logits, and whether they may be sampled."""

    ids: Tensor
    added: Tensor
    allowed: Tensor

    def of(self, z: Tensor) -> Edited:
        """Edits the logits of the ids."""
        return Edited(self.ids, *(each.masked_fill(~self.allowed, -math.inf) for each in (z + self.added, z)))


def logits_from(log_probs: Tensor, lse: Tensor) -> Tensor:
    """Returns logits in float64, of -inf in a row without any finite one. lse: ``[N, 1]``."""
    return torch.where(lse == -math.inf, lse, log_probs.double() + lse)


class Merged(NamedTuple):
    """Ids of rows with their logits, of all ids that the rows may have."""

    ids: Tensor  # [N, any]
    z: Tensor  # [N, any] in float64, as the others
    unedited: Tensor
    lse: Tensor  # [N, 1]


def largest_of_all(ids: Tensor, z: Tensor, lse: Tensor, edited: Edited) -> Merged:
    """Returns as many of the largest logits of all ids as there are others, ``[N, K]``; of equal ones the smaller id.

    lse: of all others, ``[N, 1]``.
    """
    all_ids, all_z = torch.cat((ids, edited.ids), -1), torch.cat((z, edited.z), -1)
    by_id = all_ids.argsort(stable=True)
    order = by_id.gather(-1, all_z.gather(-1, by_id).argsort(stable=True, descending=True))[:, : ids.shape[1]]
    unedited = torch.cat((z, edited.unedited), -1)
    total = torch.logaddexp(lse, edited.z.logsumexp(-1, keepdim=True))
    return Merged(all_ids.gather(-1, order), all_z.gather(-1, order), unedited.gather(-1, order), total)


def winners(ids: Tensor, keys: Tensor, z: Tensor, lse: Tensor, edited: Edited, seed: Tensor) -> Merged:
    """Returns the samples of all ids, from those of the others ``[N, S]``."""
    rows, others = torch.arange(ids.shape[0], device=ids.device), Merged(ids, z, z, lse)
    chosen = []
    for sample in range(ids.shape[1]):
        of_edited = edited.z + noise(seed, rows, sample, edited.ids)
        best = of_edited.amax(-1, keepdim=True)
        place = torch.where(of_edited == best, edited.ids, torch.iinfo(torch.int64).max).argmin(-1, keepdim=True)
        mine, id = keys[:, sample, None].double(), ids[:, sample, None]
        wins = (best > mine) | ((best == mine) & (edited.ids.gather(-1, place) < id) & (best > -math.inf))
        chosen.append([torch.where(wins, a.gather(-1, place), b[:, sample, None]) for a, b in zip(edited, others)])
    total = torch.logaddexp(lse, edited.z.logsumexp(-1, keepdim=True))
    of_ids, of_z, unedited = (torch.cat(each, -1) for each in zip(*chosen))
    return Merged(of_ids, of_z, unedited, total)


def entropy(of_others: Tensor, lse: Tensor, edited: Edited, total: Tensor) -> Tensor:
    """Returns the entropy of all ids, ``[N]``, from that of the others. lse, total: of the others and of all."""
    mass = (edited.z - total).exp()
    share = (lse - total).exp()[:, 0]
    of_lse = torch.where(share > 0, share * (lse[:, 0] - of_others.double()), 0)
    whole = total[:, 0].masked_fill(~total[:, 0].isfinite(), math.nan)
    return whole - of_lse - torch.where(mass > 0, mass * edited.z, 0).sum(-1)
