"""The preparation of a call: checks and casts arguments, and resolves them to a PreparedCall.

Every interface goes through ``prepare``. autograd.py then runs the call.

A prepared call depends on options and on the layouts of tensors, not on data. In eager mode (``can_run_eagerly``) it is
looked up by one key, and made only if the key is new.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from . import options as _options
from .errors import UnsupportedError
from .native import Cache
from .options import (
    COUNTS,
    DRAW_STATS,
    NUMBERS,
    SIZE_SAVED,
    Flags,
    Wants,
    check_targets_shape,
    dense_message,
    shape_text,
)
from .passes import PassKey
from .run import CODES, check_learned_scale, check_learned_temperature, device_key, stats_dtype

if TYPE_CHECKING:
    from .screened import ScreenedWeight

Number = float | Tensor
Seed = int | Tensor | torch.Generator | None
DEFAULTS = _options.DEFAULTS


# ---- eager mode: nothing in PyTorch traces, counts, replaces or transforms calls

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Dispatch keys of plain tensors; others are sparse, nested, batched, functional, negated views, ...
_PLAIN_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView")


def _bits(names: Iterable[str]) -> int:
    bits = 0
    for name in names:
        key = torch._C._parse_dispatch_key(name)
        bits |= 0 if key is None else torch._C.DispatchKeySet(key).raw_repr()
    return bits


_dispatch_keys: Any = torch._C._dispatch_keys
_OTHER_BITS = ~_bits(_PLAIN_KEYS)


def _are_default_devices() -> bool:
    """Whether all function modes are those of torch.set_default_device, which changes no call that names a device."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return all(type(mode) is DeviceContext for mode in modes)


def are_off() -> bool:
    """Whether no compiler, mode, transform, trace or level of forward-mode differentiation is on in this thread."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and not _are_default_devices())
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or getattr(forward_ad, "_current_level", 0) >= 0
    )


def are_plain(tensors: Iterable[object]) -> bool:
    """Whether all are of no subclass, with memory that holds their values. Skips None."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN_TYPES or _dispatch_keys(tensor).raw_repr() & _OTHER_BITS):
            return False
    return True


_KEYS = (type(None), bool, int, float, str)  # types of options that a key holds


def key_of(
    function: str,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    may_be_tensors: Sequence[str] = ("bias",),
    data: Sequence[str] = (),
    may_train: bool = True,
    is_flat: bool = False,
) -> tuple[Any, ...] | None:
    """Returns all that a call in eager mode depends on beside data, from the given arguments alone.

    None if something watches the call or it depends on more: an option that is an object, or a tensor with a number.

    tensors: hidden, weight and others. may_be_tensors: options whose tensors are data. data: options whose other values
    are data. may_train: False gives None for a call with gradients. is_flat: gives None unless hidden is [N, D].
    """
    if not are_off():
        return None
    is_constant = not may_train and torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or (is_constant and tensor.requires_grad):
            return None
    hidden, weight, *_ = tensors
    if is_flat and hidden.dim() != 2:
        return None
    key: list[Any] = [function]
    given = list(tensors)
    for name, value in options.items():
        if isinstance(value, Tensor):
            if name not in may_be_tensors or type(value) not in _PLAIN_TYPES or (is_constant and value.requires_grad):
                return None
            key.append(name)
            given.append(value)
        elif name in data:
            key += (name, type(value))
        elif type(value) in _KEYS:
            key += (name, type(value), value)
        else:
            return None
    for tensor in given:
        if _dispatch_keys(tensor).raw_repr() & _OTHER_BITS:
            return None
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    device = "cuda" if hidden.is_cuda else "cpu"
    key.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
    return (*key, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), device_key(hidden, weight))


def has_dtensor(values: Iterable[object]) -> bool:
    """Whether one of them is a DTensor, without importing torch.distributed.tensor."""
    return any(isinstance(value, Tensor) and hasattr(type(value), "placements") for value in values)


# ---- checks; name: the argument's, for messages


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name}: expected a tensor on the CPU or a CUDA device, got device meta: it holds no values, as in a "
            "model made on meta or with offloaded weights (accelerate loads a module's weights only around its own "
            "forward); load it first"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a tensor on the CPU or a CUDA device, got device {tensor.device}")
    if not torch.compiler.is_compiling():
        check_plain(name, tensor)


def check_plain(name: str, tensor: Tensor) -> None:
    if hasattr(tensor, "full_tensor") and hasattr(tensor, "placements"):
        raise TypeError(f"{name}: expected a plain torch.Tensor, got a DTensor {_how_to_gather(name, tensor)}")
    if hasattr(type(tensor), "__tensor_flatten__"):  # quantised weights and other wrappers
        raise TypeError(
            f"{name}: expected a plain torch.Tensor, got {type(tensor).__name__} (unwrap or dequantise it first; "
            "logitless.linear_cross_entropy takes a logitless.QuantizedWeight of a frozen quantised head)"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{name}: logitless does not support the transforms of torch.func (vmap, grad, jvp); "
            'use leading batch dimensions, reduction="none" and torch.autograd instead'
        )
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(f"{name}: logitless does not support forward-mode differentiation")


def _how_to_gather(name: str, tensor: Tensor) -> str:
    """Returns the end of a message: the placements of a DTensor, and the tensor to pass instead."""
    placements = tuple(tensor.placements)  # type: ignore[attr-defined]
    if all(placement.is_replicate() for placement in placements):
        call, part = "to_local", "which is the whole tensor"
    else:
        call, part = "full_tensor", "as to_local() is only a part"
    text = f"of placements {placements}: pass {name}.{call}(), {part}"
    if name not in ("weight", "bias", "scale", "temperature", "student_weight", "student_bias"):
        return text
    text += (
        f"; where ranks hold tokens of their own, as under FSDP, pass {call}(grad_placements=[Partial()]), else its "
        "gradient is that of this rank's tokens alone"
    )
    if call == "full_tensor":
        text += ". logitless.linear_cross_entropy takes a head sharded over the vocabulary, with hidden as a DTensor"
    return text


def check_devices(device: torch.device, tensors: dict[str, Tensor | None], of: str = "hidden") -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, as {of} is, got device {tensor.device}")


def check_integers(name: str, tensor: Tensor) -> None:
    _options.target_code(tensor.dtype, name)


def check_real(name: str, tensor: Tensor) -> None:
    if tensor.dtype.is_complex:
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    _options.check_shape(name, tensor.shape, shape, meaning)


def check_constant(name: str, tensor: Tensor, hint: str) -> None:
    if tensor.requires_grad:
        raise ValueError(f"{name}: expected a tensor that does not require grad, got one that does ({hint})")


def check_numbers(name: str, tensor: Tensor | None, shape: Sequence[int], meaning: str, constant: str) -> None:
    """Checks real numbers without a gradient. constant: how to get one, for the message."""
    if tensor is not None:
        check_tensor(name, tensor)
        check_real(name, tensor)
        check_shape(name, tensor, shape, meaning)
        check_constant(name, tensor, constant)


def check_matrices(tensors: dict[str, Tensor | None], least_vocab: int = 1) -> None:
    """Checks hidden states, weight and bias of a head, by the caller's names; None for no bias."""
    for place, (name, tensor) in enumerate(tensors.items()):
        if tensor is not None or place < 2:
            check_tensor(name, tensor)
    _options.check_matrices(tensors, least_vocab)


def check_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, least_vocab: int = 1
) -> None:
    """Checks all but the shape of targets."""
    check_tensor("hidden", hidden)
    check_tensor("targets", targets)
    if targets.dtype.is_floating_point and targets.dim() == hidden.dim():
        raise TypeError(dense_message(targets.dtype))
    check_integers("targets", targets)
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    check_matrices(tensors, least_vocab)


def check_main_grad(main_grad: Tensor, weight: Tensor, stats: torch.dtype) -> None:
    check_tensor("main_grad", main_grad)
    if main_grad.dtype != stats:
        raise TypeError(f"main_grad: expected {stats}, got {main_grad.dtype}")
    check_shape("main_grad", main_grad, weight.shape, "that of weight")
    check_constant("main_grad", main_grad, "it is a buffer that gradients are added to")
    if not torch.compiler.is_compiling() and main_grad.is_neg():
        raise ValueError("main_grad: expected a buffer that holds its values, got a view that negates them")
    rows, columns = main_grad.shape
    if (columns > 1 and main_grad.stride(1) != 1) or (rows > 1 and main_grad.stride(0) < columns):
        raise ValueError(f"main_grad: expected contiguous rows, got strides {shape_text(main_grad.stride())}")


def hooks_of(linear: nn.Module) -> list[Any]:
    """Returns the functions that run with a layer's forward or in its place, as accelerate's do."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return [
        *(hook for of_kind in hooks for hook in of_kind.values()),
        *(value for name, value in linear.__dict__.items() if name == "forward"),
    ]


# Their hooks place parameters, and leave values as they are.
_PLACING = ("deepspeed.", "torch.distributed.")


def check_linear(linear: nn.Module, name: str = "linear") -> None:
    """Checks a layer whose weight alone is used, without a call. Adapters around it and hooks would be left out."""
    if type(linear).forward is not nn.Linear.forward:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        raise UnsupportedError(
            f"{name}: expected a torch.nn.Linear, got a {kind} (only its weight and bias would be used)"
        )
    for hook in hooks_of(linear):
        if not str(getattr(hook, "__module__", "")).startswith(_PLACING):
            own = linear.__dict__.get("forward")
            kind = "a forward of its own" if hook is own else getattr(hook, "__qualname__", type(hook).__name__)
            raise UnsupportedError(
                f"{name}: expected a layer without hooks, got one with {kind}, which would not run (spectral_norm and "
                "weight_norm of torch.nn.utils.parametrizations need no hooks)"
            )


# ---- options that are numbers or tensors of one element

_LOSS_OPTIONS = tuple(_options.LOSS_OPTIONS)
_LEARNED = ("scale", "temperature")  # their tensors may have a gradient
UNUSED = _options.make_options(DEFAULTS, 1) | {"top_k": 0}  # the operator's options where a function lacks them


def scalar(name: str, tensor: Tensor, *, learned: bool = False) -> Tensor:
    """Checks a tensor of one element and returns it as a scalar, detached unless it is learned."""
    check_tensor(name, tensor)
    if tensor.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {shape_text(tensor.shape)}")
    if tensor.dtype == torch.bool or tensor.dtype.is_complex:
        raise TypeError(f"{name}: expected a number, got {tensor.dtype}")
    if not learned:
        with_gradients = "hidden, weight, bias, scale and temperature"
        check_constant(name, tensor, f"it has no gradient, as {with_gradients} have")
    return tensor.reshape(()) if learned else tensor.detach().reshape(())


def value(name: str, number: Any) -> Any:
    """Returns a number, or a tensor's number, which waits for its device.

    Code that is being compiled keeps the tensor, except for threshold, whose range is checked in Python.
    """
    if not isinstance(number, Tensor):
        return number
    tensor = scalar(name, number, learned=name in _LEARNED).detach()
    return tensor if torch.compiler.is_compiling() and name != "threshold" else tensor.item()


def _is_static(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, Tensor):
        return False
    from torch.fx.experimental import symbolic_shapes

    known = getattr(symbolic_shapes, "has_static_value", None)
    return known is None or known(value)  # an older PyTorch compiles anew for each number


def _as_tensor(number: Any) -> Tensor:
    if isinstance(number, Tensor):
        return number.to("cpu", torch.float64)
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return one * (math.nan if number is None else number)  # a product turns a symbol into an input of the graph


def pack_numbers(options: dict[str, Any], saves: bool) -> tuple[dict[str, Any], Tensor | None]:
    """Returns the options with their numbers as a list, and a tensor of them if compiled code must not hold constants.

    Numbers that determine the size of the tensor saved stay constants where there is one; _choose() sees to that.
    """
    values = [options[name] for name in NUMBERS]
    others = {name: value for name, value in options.items() if name not in NUMBERS}
    tensor = None
    if torch.compiler.is_compiling() and not all([_is_static(value) for value in values]):
        tensor = torch.stack([_as_tensor(value) for value in values])
        unused = UNUSED | ({name: options[name] for name in SIZE_SAVED if _is_static(options[name])} if saves else {})
        values = [unused[name] for name in NUMBERS]
    others["numbers"] = [math.nan if value is None else value for value in values]
    return others, tensor


# ---- arguments


_GIVEN = "hidden weight targets bias class_weight token_weight row_temperature target_weight main_grad".split()
TENSORS = len(_GIVEN)  # the first fields are tensors or None
_FIELDS: dict[str, Any] = dict.fromkeys((*_GIVEN, "num_items", "seed"))
FIRST_OPTION = len(_FIELDS)  # the fields before it may be tensors
_FIELDS |= {name: value for name, value in DEFAULTS.items() if name in _options.HEAD_OPTIONS and name not in _FIELDS}
_FIELDS |= {"return_stats": False, "rounds_to": _options.F32}
_namedtuple: Any = collections.namedtuple  # its names are computed, so no type checker knows them
_Fields: Any = _namedtuple("_Fields", _FIELDS, defaults=list(_FIELDS.values())[3:])


class Arguments(_Fields):  # type: ignore[misc]
    """The arguments of a call: tensors, num_items and seed, which may be tensors, and the options of HeadOptions.

    Options are no tensors after without_number_tensors().

    Attributes:
        row_temperature: A number for each row; replaces temperature.
        target_weight: Has the target's shape. It is given exactly if rows have several targets.
        rounds_to: The logitless_dtype to which products round float32 tensors under autocast.
    """

    __slots__ = ()
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    row_temperature: Tensor | None
    target_weight: Tensor | None
    main_grad: Tensor | None
    if TYPE_CHECKING:

        def _replace(self, **fields: Any) -> Arguments: ...
        def _asdict(self) -> dict[str, Any]: ...

    def rows(self) -> torch.Size:
        """Returns the shape of vectors with one element a row."""
        return self.hidden.shape[:-1]

    def has_several_targets(self) -> bool:
        """Whether rows have several targets. Without target_weight, targets with one more dimension are a mistake."""
        return self.target_weight is not None and self.targets.dim() == self.hidden.dim()


Learned = tuple[Tensor | None, ...]  # the options of _LEARNED as scalars, None where they are numbers


def with_row_temperature(a: Arguments, rows: Sequence[int]) -> Arguments:
    """Moves a temperature with one number for each row into its own field.

    A tensor of one element for a single row counts as that row's, so the row has the bits that it has in a batch. A
    learned temperature is always one for all rows.
    """
    given = a.temperature
    if not isinstance(given, Tensor):
        return a
    is_rows = given.dim() > 0 and given.shape == rows and not given.requires_grad
    return a._replace(row_temperature=given, temperature=1.0) if is_rows or given.numel() != 1 else a


def ids_of(a: Arguments) -> Arguments:
    """Returns arguments whose targets are several ids a row."""
    check_tensor("hidden", a.hidden)
    check_tensor("ids", a.targets)
    if a.targets.dim() != a.hidden.dim():
        expected = shape_text((*a.hidden.shape[:-1], "K"))
        raise ValueError(f"ids: expected shape {expected}, got {shape_text(a.targets.shape)}")
    check_integers("ids", a.targets)
    return a._replace(target_weight=torch.ones_like(a.targets))


def tokens_of(a: Arguments, rows: Sequence[int]) -> Arguments:
    """Returns arguments without a use for targets: all are 0, so that no row is ignored."""
    targets = torch.zeros(tuple(rows), dtype=torch.int64, device=a.hidden.device)
    return a._replace(targets=targets)


def autocast(a: Arguments) -> Arguments:
    """Casts the arguments where autocast would cast those of F.linear, which leaves out float64.

    Float32 tensors stay as they are: products round them a part at a time, and write float32 gradients directly.
    """
    device = a.hidden.device.type
    if not torch.is_autocast_enabled(device):
        return a
    (hidden, weight), rounds_to = cast_by_autocast(a.hidden, a.weight)
    return a._replace(hidden=hidden, weight=weight, rounds_to=rounds_to)


def cast_by_autocast(*operands: Tensor) -> tuple[list[Tensor], int]:
    """Returns operands as autocast wants them, and the dtype to which products round float32 ones."""
    dtypes = {tensor.dtype for tensor in operands}
    if torch.float64 in dtypes:
        return list(operands), _options.F32
    dtype, halves = torch.get_autocast_dtype(operands[0].device.type), (torch.bfloat16, torch.float16)
    rounds = dtype in halves and torch.float32 in dtypes
    cast = [t.to(dtype) if t.dtype in halves or (t.dtype == torch.float32 and not rounds) else t for t in operands]
    return cast, CODES[dtype] if rounds else _options.F32


def check_seed(seed: Seed, device: torch.device) -> None:
    if isinstance(seed, Tensor):
        check_tensor("seed", seed)
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(f"seed: expected one int64 element, got {seed.dtype} of shape {shape_text(seed.shape)}")
        check_devices(device, {"seed": seed})
    elif isinstance(seed, torch.Generator):
        if seed.device.type != device.type:
            raise ValueError(f"seed: expected a generator on {device}, as hidden is, got one on {seed.device}")
    elif seed is not None:
        _options.integer("seed", seed)


def seed_tensor(seed: Seed, device: torch.device) -> Tensor:
    """Returns a scalar on the device.

    It is made outside of the operators, so a recomputed forward pass draws the same elements.
    """
    if isinstance(seed, Tensor):
        return seed.reshape(()) if seed.dim() > 0 else seed
    if seed is None or isinstance(seed, torch.Generator):
        return torch.randint(_options.SEED_RANGE, (), dtype=torch.int64, device=device, generator=seed)
    return torch.full((), seed, dtype=torch.int64, device=device)


def check_head(a: Arguments) -> None:
    """Checks hidden, weight, bias and targets before they are cast."""
    check_operands(a.hidden, a.weight, a.bias, a.targets)
    check_targets_shape("targets", a.targets.shape, a.hidden.shape[:-1], a.has_several_targets())


def check_rest(a: Arguments, rows: Sequence[int], in_group: bool) -> None:
    """Checks all other arguments except options that are numbers. They must be cast already.

    rows: the shape of vectors with one element a row. in_group: whether ranks hold the head together; class weights are
    then those of the whole vocabulary.
    """
    operands = {"hidden": a.hidden, "weight": a.weight, "bias": a.bias}
    _options.check_float64(torch.float64, operands)
    _options.flag("recompute_logits", a.recompute_logits)
    if a.class_weight is not None:
        check_tensor("class_weight", a.class_weight)
        check_real("class_weight", a.class_weight)
        if not in_group:
            check_shape("class_weight", a.class_weight, a.weight.shape[:1], "V")
        elif a.class_weight.dim() != 1:
            raise ValueError(
                f"class_weight: expected shape [V] of the whole vocabulary, got {shape_text(a.class_weight.shape)}"
            )
        check_constant("class_weight", a.class_weight, "class weights have no gradient")
    of_rows = "one for each row" if a.has_several_targets() else "that of targets"
    check_numbers("token_weight", a.token_weight, rows, of_rows, 'use reduction="none" and multiply')
    hint = "one element may, one for each row is a constant"
    check_numbers("temperature", a.row_temperature, rows, f"{of_rows}, or one element", hint)
    if a.has_several_targets():
        _options.check_several_targets(a.class_weight, a.gradient)
    if a.target_weight is not None:
        if not a.has_several_targets():
            raise ValueError(
                "target_weight: expected None with one target a row, got a tensor; several targets a row have one more "
                "dimension, and token_weight takes weights of rows"
            )
        hint = "use logitless.linear_log_probs and multiply"
        check_numbers("target_weight", a.target_weight, a.targets.shape, "that of targets", hint)
    if isinstance(a.num_items, Tensor):
        if a.reduction != "mean":
            raise ValueError(f'num_items: expected None unless reduction is "mean", got a tensor with "{a.reduction}"')
        scalar("num_items", a.num_items)
    if a.main_grad is not None:
        check_main_grad(a.main_grad, a.weight, stats_dtype(a.hidden))
    names = ("weight", "targets", "bias", "class_weight", "token_weight", "target_weight", "main_grad")
    tensors = {name: getattr(a, name) for name in names} | {"temperature": a.row_temperature}
    check_devices(a.hidden.device, tensors)
    _options.check_seed_is_used(a.seed, a.gradient)
    check_seed(a.seed, a.hidden.device)


def learned(a: Arguments) -> Learned:
    given = zip(_LEARNED, (a.scale, a.temperature))
    return tuple([scalar(name, one, learned=True) if isinstance(one, Tensor) else None for name, one in given])


def without_number_tensors(a: Arguments) -> Arguments:
    """Returns arguments whose options are numbers, unless code is being compiled. Waits for the tensors' devices."""
    return a._replace(**{name: value(name, getattr(a, name)) for name in _NUMBER_OPTIONS})


def inputs_of(a: Arguments, learned: Learned, trained: Wants) -> dict[str, Tensor]:
    """Returns the tensors of the problem without seed and numbers, and the learned options with wanted gradients."""
    hidden, stats = a.hidden, stats_dtype(a.hidden)
    inputs = {
        "hidden": hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1]),
        "weight": a.weight,
        "targets": a.targets,
    }
    if a.bias is not None:
        inputs["bias"] = a.bias
    if a.class_weight is not None:
        inputs["class_weight"] = a.class_weight.to(stats)
    vectors = {"token_weight": a.token_weight, "temperature": a.row_temperature}
    inputs |= {name: given.to(stats).reshape(-1) for name, given in vectors.items() if given is not None}
    if a.target_weight is not None:
        inputs["target_weight"] = a.target_weight.to(stats).reshape(-1, a.targets.shape[-1])
    if isinstance(a.num_items, Tensor):
        inputs["num_items"] = scalar("num_items", a.num_items)
    scalars = zip(("learned_scale", "learned_temperature"), learned, (trained.scale, trained.temperature))
    return inputs | {name: given for name, given, wanted in scalars if given is not None and wanted}


# ---- preparation


class Ranks(NamedTuple):
    """A group of ranks that hold the head together, as operators take it."""

    group: str  # the group's name
    group_size: int
    vocab_start: int  # -1: the shards are in the order of ranks
    vocab_total: int  # -1: the sum of all shards
    sequence_parallel: bool  # hidden holds this rank's tokens alone
    own_targets: bool  # targets and other vectors of tokens do as well
    seed_given: bool  # by the caller, so no rank draws one
    adds_up: bool = True  # gradients of tensors that all ranks have are summed; else each rank gets its part

    def tokens(self, hidden: Tensor) -> int:
        """Returns the number of tokens of all ranks. hidden: this rank's."""
        return int(hidden.shape[0]) * (self.group_size if self.sequence_parallel else 1)


class CallOf(NamedTuple):
    """A function of _options.FUNCTIONS, with properties of the call beside its arguments.

    Attributes:
        ranks: The group of ranks; its callers check operands and targets.
        rows: The shape of all ranks' tokens; None: that of the hidden states.
    """

    function: str = "linear_cross_entropy"
    k: int = 0
    ranks: Ranks | None = None
    rows: Sequence[int] | None = None


class PreparedCall:
    """The passes and options of all calls with one key. Made from the first call's cast arguments, which it checks."""

    def __init__(self, a: Arguments, learned: Learned, of: CallOf) -> None:
        ranks, rows = of.ranks, a.rows() if of.rows is None else of.rows
        check_rest(a, a.rows() if ranks is not None and ranks.own_targets else rows, ranks is not None)
        several = a.has_several_targets()
        names = self.names = _options.stats_names(a.return_stats, a.gradient, a.screen, several)
        if ranks is not None:
            if a.screen != "none":
                raise UnsupportedError(f'screen: expected "none" in a group of ranks, got {a.screen!r}')
            for name in names:
                if name in DRAW_STATS:
                    raise UnsupportedError(f"return_stats: expected no {name} in a group of ranks, got it")
        given = {name: getattr(a, name) for name in _LOSS_OPTIONS}
        given["num_items"] = None if isinstance(a.num_items, Tensor) else a.num_items
        options = _options.make_options(given, rows[-1] if rows else 1, a.rounds_to) | {"top_k": of.k}
        self.options = options
        self._choose(a, learned, of)
        trained = self.trained
        _options.check_learned(options, [name for name in ("scale", "temperature") if getattr(trained, name)])
        if trained.scale and not isinstance(options["scale"], Tensor) and not torch.compiler.is_compiling():
            # A compiled graph does not know a tensor's number; its run checks it.
            check_learned_scale(options["scale"])
        if trained.temperature and not isinstance(options["softcap"], Tensor):
            check_learned_temperature(options["softcap"])
        self.trains, self.together = any(trained), self.pass_key.kind == _options.FORWARD_BACKWARD
        self.later = self.pass_key._replace(kind=_options.BACKWARD, flags=Flags(*trained))
        results = _options.FUNCTIONS[of.function].outputs or ("loss",)
        requested = (*names, *(("counts",) if self.pass_key.flags.want_counts else ()))
        constant = (*_options.CONSTANT, "counts", *DRAW_STATS)
        self.outputs = (*results, *(name for name in (*_options.DIFFERENTIABLE, *constant) if name in requested))
        self.constant = tuple(
            name for name in self.outputs if name in constant or (self.together and name not in results)
        )
        # autograd.py keeps these in eager mode: the run, and the names of tensors that are its first arguments as is.
        self.run: Any = None
        self.reads: tuple[str, ...] | None = None
        self.screened_runs: dict[int, Any] = {}  # those with a ScreenedWeight, by the size of the copy that they read
        self.packed: tuple[dict[str, Any], Tensor | None] = ({}, None)  # else its options, as operators take them

    def _choose(self, a: Arguments, learned: Learned, of: CallOf) -> None:
        """Chooses the passes: gradients with the loss, or later, once the upstream gradients are known.

        Sets these attributes:
            trained: whose gradients are wanted.
            pass_key: the first pass, FORWARD or FORWARD_BACKWARD. Its flags have the gradients that it computes, or
                that its backward pass will compute.
            draws: whether it reads the seed.
            draw_stats: whether the statistics of the draw need a pass of their own.
            passes_over_draw: whether it leaves out a draw that a pass with gradients would make.
        """
        names = self.names
        tensors = (a.hidden, a.weight, a.bias, *learned)
        require = [t is not None and t.requires_grad for t in tensors]
        # Compiled code does not run under inference mode, and cannot query it.
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        grad = torch.is_grad_enabled() and not inference and of.function != "linear_top_k"
        trained = self.trained = Wants(*(grad and wanted for wanted in require))
        self.draws = self.draw_stats = self.passes_over_draw = False
        # A compiled graph for sizes that change must not hold a plan, which would make them constants.
        sizes = (a.hidden.numel(), *(self.options[name] for name in SIZE_SAVED))
        saves_exp_logits = (
            a.hidden.is_cuda
            and torch.cuda.is_available()  # fake tensors may be on a device that is not there
            and a.gradient == "exact"
            and not a.recompute_logits
            and (not torch.compiler.is_compiling() or (of.ranks is None and all([_is_static(size) for size in sizes])))
        )
        if of.function != "linear_cross_entropy":
            flags = Flags(stats=("lse",) if of.function == "linear_log_probs" else ()).with_gradients(trained)
            flags = flags._replace(saves=saves_exp_logits and any(trained))
            self.pass_key = PassKey(_options.FORWARD, flags, of.function, of.ranks)
            return
        half = any(on and t is not None and t.dtype == torch.float16 for t, on in zip(tensors[:3], trained))
        stats_need_gradients = a.differentiable_stats and any(name in _options.DIFFERENTIABLE for name in names)
        later = a.reduction == "none" or a.main_grad is not None or half or stats_need_gradients
        sparsified, screens = a.gradient != "exact", a.screen != "none"
        if screens and any(trained):
            _options.check_together(a.reduction, a.main_grad, half, stats_need_gradients)
        want_draw_stats = any(name in DRAW_STATS for name in names)
        stats = (*names, "argmax") if "correct_count" in names else names
        flags = Flags(want_counts=any(name in COUNTS for name in names), stats=_options.stats_of_rows(stats))
        if any(trained) and not later:
            flags = flags.with_gradients(trained)._replace(want_draw_stats=want_draw_stats)
            self.pass_key, self.draws = PassKey(_options.FORWARD_BACKWARD, flags, of.function, of.ranks), sparsified
            return
        self.draws = sparsified and (screens or any(trained))
        self.draw_stats = want_draw_stats
        self.passes_over_draw = sparsified and any(require) and not self.draws and not want_draw_stats
        if any(trained):
            # The backward pass reads lse. A rank saves no draws: the backward pass repeats them from the same seed.
            flags = flags._replace(stats=_options.stats_of_rows((*stats, "lse")))
            saves = saves_exp_logits or (self.draws and of.ranks is None)
            flags = flags._replace(saves=saves).with_gradients(trained)
        self.pass_key = PassKey(_options.FORWARD, flags, of.function, of.ranks)


class Prepared(NamedTuple):
    """A call with its arguments."""

    call: PreparedCall
    a: Arguments
    learned: Learned
    direct: bool  # eager mode: no operator is needed
    screen: ScreenedWeight | None = None  # used in eager mode alone


_calls: Cache[Any, PreparedCall] = Cache(256)
_SIMPLE = frozenset((type(None), bool, int, float, str, tuple))
_INTEGER_OPTIONS = ("ignore_index", "shift", "max_workspace_bytes")
_NUMBER_OPTIONS = tuple(name for name in NUMBERS if name != "num_items")


def can_run_eagerly(a: Arguments) -> bool:
    """Whether nothing in PyTorch watches calls, and the tensors are plain ones."""
    if not are_off() or a.hidden is None or a.weight is None or a.targets is None:
        return False
    tensors: tuple[object, ...] = a[:TENSORS]
    if a.num_items is not None or a.seed is not None:
        tensors += tuple(value for value in (a.num_items, a.seed) if isinstance(value, Tensor))
    return are_plain(tensors)


def prepare(a: Arguments, of: CallOf = CallOf(), plain: bool | None = None) -> Prepared:
    """Checks, casts and resolves the arguments of a call. plain: the result of can_run_eagerly(), where it is known."""
    return _prepare_plain(a, of) if (can_run_eagerly(a) if plain is None else plain) else _prepare_watched(a, of)


def _prepare_watched(a: Arguments, of: CallOf) -> Prepared:
    """Prepares a call with code that a compiler can trace."""
    if of.ranks is None:
        check_head(a)
    a = autocast(a)
    scalars = learned(a)
    a = without_number_tensors(a)
    call = PreparedCall(a, scalars, of)
    # Not in the autograd function: two calls in one compiled graph could not share numbers that the first reads there.
    call.packed = pack_numbers(call.options, call.pass_key.flags.saves)
    return Prepared(call, a, scalars, False)


def _prepare_plain(a: Arguments, of: CallOf) -> Prepared:
    scalars = learned(a)
    types = tuple(map(type, a[FIRST_OPTION:]))
    if not _SIMPLE.issuperset(types):
        a = _simplified(a)
        types = tuple(map(type, a[FIRST_OPTION:]))
    if a.num_items is not None:
        a = a._replace(num_items=_known_num_items(a))
    if torch.is_autocast_enabled("cuda" if a.hidden.is_cuda else "cpu"):
        a = autocast(a)
    key = _key(a, scalars, types, of)
    try:
        call = _calls.get(key)
    except TypeError:  # an option of a wrong type, which a check reports by name
        return _prepare_watched(a, of)
    if call is None:
        if of.ranks is None:
            check_head(a)
        call = PreparedCall(a, scalars, of)
        _calls.put(key, call)
    elif a.seed is not None:
        check_seed(a.seed, a.hidden.device)
    return Prepared(call, a, scalars, True)


def _key(a: Arguments, learned: Learned, types: tuple[type, ...], of: CallOf) -> tuple[Any, ...]:
    """Returns all that a PreparedCall depends on. types: the options' types, as 1, 1.0 and True are equal."""
    tensors: tuple[Tensor | None, ...] = a[:TENSORS]
    num_items = a.num_items
    return (
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors],
        None if num_items is None else (type(num_items), isinstance(num_items, Tensor) or num_items),
        a.seed is None,
        a[FIRST_OPTION:],
        types,
        *[t is not None and t.requires_grad for t in learned],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        device_key(a.hidden, a.weight),
        of,
    )


def _plain(value: Any) -> Any:
    """Returns objects like numbers, such as arrays, as numbers, as they may change later; others unchanged."""
    if type(value) in _SIMPLE:
        return value
    if hasattr(type(value), "__index__"):
        return operator.index(value)
    return float(value) if hasattr(type(value), "__float__") else value


def _simplified(a: Arguments) -> Arguments:
    """Returns arguments whose options can be a key: numbers instead of tensors, tuples instead of lists."""
    a = without_number_tensors(a)
    a = a._replace(**{name: _plain(getattr(a, name)) for name in (*_INTEGER_OPTIONS, *_NUMBER_OPTIONS)})
    if isinstance(a.return_stats, Sequence) and not isinstance(a.return_stats, str):
        a = a._replace(return_stats=tuple(a.return_stats))
    return a


def _known_num_items(a: Arguments) -> Any:
    """Returns num_items as a number if the CPU knows it."""
    if not isinstance(a.num_items, Tensor):
        return _plain(a.num_items)
    if a.hidden.is_cuda or a.reduction != "mean":
        return a.num_items
    return _options.checked_num_items(scalar("num_items", a.num_items).item(), a.reduction)
