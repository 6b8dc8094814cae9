"""``logitless.linear_cross_entropy`` with DTensors: the meaning of placements, and the local problem of each rank.

For each dimension of the mesh, placements decide (see docs/distributed.md):

    hidden       weight      each rank computes
    Replicate   Replicate   the same
    Shard(t)    Replicate   the loss of its own tokens
    Replicate   Shard(0)    its part of the vocabulary for all tokens
    Shard(t)    Shard(0)    its part of the vocabulary for all tokens, which are gathered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import options as _options
from ..call import Arguments, Number, check_plain
from ..errors import UnsupportedError
from ..outputs import loss
from ..run import stats_dtype
from . import _fsdp
from .group import loss_of_ranks

Placements = tuple[Placement, ...]
_PARAMETERS = ("weight", "bias", "scale", "temperature")
_OF_TARGETS = ("targets", "target_weight")  # one more dimension where rows have several targets
_OF_ROWS = (*_OF_TARGETS, "token_weight", "row_temperature")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(a: Arguments) -> Any:
    """Computes :func:`logitless.linear_cross_entropy` where some of the tensors are DTensors.

    Raises:
        TypeError: A mixture of plain tensors and DTensors has no known meaning.
        ValueError: Meshes or placements do not fit one another.
        UnsupportedError: The combination is not supported; the message names the argument.
    """
    a = _without_fsdp(a)
    if isinstance(a.hidden, DTensor) or isinstance(a.weight, DTensor):
        return _PreparedCall(a).run()
    for name, value in a._asdict().items():
        if isinstance(value, DTensor):
            check_plain("temperature" if name == "row_temperature" else name, value)
    return loss(a)


def _without_fsdp(a: Arguments) -> Arguments:
    """Returns arguments with plain tensors in place of parameters that FSDP has sharded."""
    for name in _PARAMETERS:
        value = getattr(a, name)
        owner = _fsdp.owner_of(value) if isinstance(value, DTensor) else None
        if owner is None:
            continue
        if isinstance(a.hidden, DTensor):
            raise UnsupportedError(
                f"{name}: an FSDP parameter outside its module's call, with hidden a DTensor of placements "
                f"{a.hidden.placements}: FSDP averages gradients of the ranks' own losses of plain tensors. "
                "Pass hidden.to_local() where it is this rank's tokens, or unshard() the module first"
            )
        plain: dict[str, Any] = {name: _fsdp.gathered(name, value, owner)}
        a = a._replace(**plain)
    return a


class _Layout(NamedTuple):
    hidden: DTensor
    weight: DTensor
    mesh: DeviceMesh
    given: Placements  # the caller's, for tokens
    tokens: Placements  # the local problem's, for tokens
    vocab_placements: Placements  # the local problem's, for the vocabulary
    vocab: int | None  # the dimension of the mesh over which the vocabulary is sharded

    def shares_tokens(self) -> bool:
        """Whether ranks have tokens of their own."""
        return any(placement.is_shard() for placement in self.tokens)

    def over_tokens(self, shared: Placement) -> Placements:
        """Returns ``shared`` where ranks have tokens of their own, Replicate elsewhere."""
        return tuple(shared if placement.is_shard() else Replicate() for placement in self.tokens)

    def of_weight_gradient(self) -> Placements:
        """Returns Partial where ranks have tokens of their own, as for DTensor's own products."""
        pairs = zip(self.tokens, self.vocab_placements, strict=True)
        return tuple(Partial() if tokens.is_shard() else weight for tokens, weight in pairs)


def _layout(a: Arguments) -> _Layout:
    hidden, weight = a.hidden, a.weight
    if not isinstance(weight, DTensor):
        raise TypeError(
            f"weight: expected a DTensor on the mesh of hidden, got a plain tensor with hidden of placements "
            f"{_placements(hidden)}; distribute it, or pass hidden.to_local()"
        )
    if not isinstance(hidden, DTensor):
        raise TypeError(
            "weight: expected a plain tensor or an FSDP parameter with plain hidden states, got a DTensor of "
            f"placements {weight.placements} (whether its ranks hold the same tokens or tokens of their own is "
            "unknown). With the same tokens on all ranks pass hidden as DTensor.from_local(hidden, mesh, "
            "[Replicate()]), or call logitless.distributed.linear_cross_entropy(hidden, weight.to_local(), targets, "
            "group=mesh.get_group()); with tokens of their own unshard the weight first, or pass "
            "weight.full_tensor(grad_placements=[Partial()]) and divide its gradient by what the trainer divides by"
        )
    mesh = hidden.device_mesh
    for name in (*_PARAMETERS, *_OF_ROWS, "class_weight", "num_items"):
        value = getattr(a, name)
        if isinstance(value, DTensor) and value.device_mesh != mesh:
            raise ValueError(
                f"{name}: expected a DTensor on the mesh of hidden, {mesh}, got one on {value.device_mesh}"
            )
    given = tuple(_of_tokens(placement, hidden.dim()) for placement in hidden.placements)
    weights = tuple(_of_vocabulary(placement) for placement in weight.placements)
    over = [dim for dim, placement in enumerate(weights) if placement.is_shard()]
    if len(over) > 1:
        raise UnsupportedError(
            f"weight: expected the vocabulary to be sharded over one dimension of the mesh, got placements "
            f"{weight.placements}"
        )
    vocab = over[0] if over else None
    tokens = tuple(Replicate() if dim == vocab else placement for dim, placement in enumerate(given))
    return _Layout(hidden, weight, mesh, given, tokens, weights, vocab)


def _placements(tensor: Any) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None


def _of_tokens(placement: Placement, dims: int) -> Placement:
    """Returns the placement to which hidden [..., D] is redistributed: tokens sharded or replicated, D whole."""
    if type(placement) is Shard and placement.dim < dims - 1:
        return placement
    if type(placement) in (Replicate, Shard, Partial):
        return Replicate()
    raise UnsupportedError(f"hidden: expected placements Shard, Replicate or Partial, got {placement}")


def _of_vocabulary(placement: Placement) -> Placement:
    """Returns the placement to which weight [V, D] is redistributed: V sharded or replicated, D whole."""
    if type(placement) is Shard:
        return Shard(0)  # from Shard(1) by an all-to-all
    if type(placement) in (Replicate, Partial):
        return Replicate()
    raise UnsupportedError(
        f"weight: expected placements Shard, Replicate or Partial, got {placement}; a weight sharded by FSDP "
        "and tensor parallelism can be read within the call of its FSDP module, or after unshard()"
    )


class _PreparedCall:
    """The local problem of one call; its results become DTensors."""

    def __init__(self, a: Arguments) -> None:
        self.a = a
        self.layout = layout = _layout(a)
        self.gathered = _gathered_dim(layout)
        self.names = _options.stats_names(a.return_stats, a.gradient, a.screen, a.has_several_targets())
        if a.has_several_targets():
            _options.check_several_targets(a.class_weight, a.gradient)
        if a.shift and any(p.is_shard() and p.dim == a.hidden.dim() - 2 for p in layout.given):  # type: ignore[attr-defined]
            raise UnsupportedError(
                f"shift: expected 0 where the last dimension of targets is sharded, got {a.shift} with placements "
                f"{layout.given}: shift the labels before the call"
            )
        if a.main_grad is not None and layout.shares_tokens():
            raise UnsupportedError(
                "main_grad: expected None where ranks have tokens of their own (it would hold the gradient of this "
                "rank's tokens alone), got a tensor"
            )

    def run(self) -> Any:
        given = self._local_arguments()
        vocab = self.layout.vocab
        if vocab is None:
            result: Any = loss(given)
        else:
            start, total = self._vocab_start(given.weight), self.a.weight.shape[0]
            result = loss_of_ranks(given, self.layout.mesh.get_group(vocab), start, total, self.gathered is not None)
        if self.a.return_stats is False:
            return self._returned("loss", result)
        values = {name: self._returned(name, getattr(result, name)) for name in ("loss", *self.names)}
        return result._replace(**values)

    def _local_arguments(self) -> Arguments:
        a, layout = self.a, self.layout
        weights = layout.of_weight_gradient()
        rows: dict[str, Any] = {name: self._of_rows(name, getattr(a, name)) for name in _OF_ROWS}
        given = a._replace(
            hidden=self._hidden(),
            weight=_local(layout.weight, layout.vocab_placements, weights),
            bias=self._bias(weights),
            class_weight=_whole(a.class_weight),
            num_items=_whole(a.num_items),
            scale=self._learned("scale", a.scale),
            temperature=self._learned("temperature", a.temperature),
            main_grad=a.main_grad.to_local() if isinstance(a.main_grad, DTensor) else a.main_grad,
            **rows,
        )
        if a.reduction == "mean" and a.num_items is None and layout.shares_tokens():
            given = given._replace(num_items=self._divisor(given))
        return given

    def _hidden(self) -> Tensor:
        layout, dim = self.layout, self.gathered
        if dim is None:
            return _local(layout.hidden, layout.tokens, layout.tokens)
        return _local(layout.hidden, layout.given, layout.given).movedim(dim, 0)

    def _of_rows(self, name: str, value: Tensor | None) -> Tensor | None:
        """Returns this rank's part of a vector of tokens. A plain tensor holds the whole vector."""
        if value is None:
            return None
        shape = self.a.hidden.shape[:-1]
        if name in _OF_TARGETS and self.a.has_several_targets():
            shape = shape + self.a.targets.shape[-1:]
        if tuple(value.shape) != tuple(shape):
            called = "temperature" if name == "row_temperature" else name
            raise ValueError(
                f"{called}: expected shape {_options.shape_text(shape)} (hidden over all ranks, without its last "
                f"dimension), got {_options.shape_text(value.shape)}; pass this rank's part as "
                "DTensor.from_local(part, mesh, placements)"
            )
        if not isinstance(value, DTensor):
            mesh = self.layout.mesh
            value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        part = _local(value, self.layout.tokens, self.layout.tokens)
        return part if self.gathered is None else part.movedim(self.gathered, 0)

    def _bias(self, gradient: Placements) -> Tensor | None:
        bias, layout = self.a.bias, self.layout
        if bias is None:
            return None
        if not isinstance(bias, DTensor):
            if bias.requires_grad:
                raise TypeError("bias: expected a DTensor, as weight is, got a plain tensor")
            bias = DTensor.from_local(bias, layout.mesh, [Replicate()] * layout.mesh.ndim, run_check=False)
        return _local(bias, layout.vocab_placements, gradient)

    def _learned(self, name: str, value: Number) -> Number:
        if isinstance(value, DTensor):
            return _local(value, self.layout.over_tokens(Replicate()), self.layout.over_tokens(Partial()))
        if isinstance(value, Tensor) and value.requires_grad and self.layout.shares_tokens():
            raise TypeError(f"{name}: expected a DTensor, as weight is, got a plain tensor that requires grad")
        return value

    def _divisor(self, given: Arguments) -> Tensor:
        """Returns the mean's divisor over the tokens of all ranks: the sum of token_weight * w_y over valid rows."""
        target, weights, steps = given.targets, given.token_weight, given.shift
        ignored = -100 if given.ignore_index is None else given.ignore_index
        is_valid = target != ignored
        if given.has_several_targets():
            is_valid = is_valid.any(-1)
        if steps:
            target, is_valid = target[..., steps:], is_valid[..., steps:]
            weights = None if weights is None else weights[..., : weights.shape[-1] - steps]
        valid = is_valid.to(stats_dtype(given.hidden))
        if given.class_weight is not None:
            valid = valid * given.class_weight.to(valid.dtype)[target.long().clamp(0, given.class_weight.shape[0] - 1)]
        if weights is not None:
            valid = valid * weights.to(valid.dtype)
        partial = DTensor.from_local(valid.sum(), self.layout.mesh, self.layout.over_tokens(Partial()), run_check=False)
        return partial.full_tensor()

    def _vocab_start(self, shard: Tensor) -> int:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, mesh = self.a.weight.shape, self.layout.mesh
        (rows, _), (start, _) = compute_local_shape_and_global_offset(shape, mesh, self.layout.vocab_placements)
        if rows != shard.shape[0]:
            raise ValueError(
                f"weight: expected {rows} of {shape[0]} rows on this rank, as DTensor shards them, got "
                f"{shard.shape[0]}; logitless.distributed.linear_cross_entropy takes shards of any size"
            )
        return int(start)

    def _returned(self, name: str, value: Tensor) -> Tensor:
        """Returns a result as a DTensor: a number is replicated, a vector of tokens is sharded as hidden is."""
        layout = self.layout
        if value.dim() == 0:
            placements = layout.over_tokens(Partial())
            shared = DTensor.from_local(value, layout.mesh, placements, run_check=False)
            return _moved(shared, layout.over_tokens(Replicate()))
        if self.gathered is not None:
            value = value.movedim(0, self.gathered)
        shape = torch.Size(self.a.hidden.shape[:-1])
        stride = torch.empty(shape, device="meta").stride()
        rows = DTensor.from_local(value, layout.mesh, layout.tokens, run_check=False, shape=shape, stride=stride)
        return _moved(rows, layout.given)


def _gathered_dim(layout: _Layout) -> int | None:
    """Returns the dimension of hidden that the group gathers, or None.

    It is the sharded one if the ranks that share the vocabulary hold equal parts of it. Its gradient is reduced and
    scattered. Other layouts are redistributed.
    """
    if layout.vocab is None:
        return None
    placement = layout.given[layout.vocab]
    if type(placement) is not Shard:
        return None
    dim, parts = placement.dim, layout.mesh.size()
    if sum(type(other) is Shard and other.dim == dim for other in layout.given) > 1:
        return None  # the parts of a group may not be adjacent
    return dim if layout.hidden.shape[dim] % parts == 0 else None


def _moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    if tuple(tensor.placements) == tuple(placements):
        return tensor
    return tensor.redistribute(tensor.device_mesh, placements)


def _local(tensor: DTensor, placements: Placements, gradient: Placements) -> Tensor:
    """Returns this rank's part at these placements. gradient: the placements of the part's gradient."""
    local: Tensor = _moved(tensor, placements).to_local(grad_placements=gradient)
    return local


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
