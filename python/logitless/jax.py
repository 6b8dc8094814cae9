"""``linear_cross_entropy`` for JAX, on CPUs and CUDA devices. Needs jax 0.10 or newer, not PyTorch.

XLA runs the library itself, through its foreign functions. Plans are made where a call is traced, so options are
constants of compiled code.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import native
from . import options as _options
from .errors import UnsupportedError
from .inspection import default_threads
from .options import (
    BACKWARD,
    DIFFERENTIABLE,
    DRAW_STATS,
    F32,
    FASTEST,
    FORWARD,
    FORWARD_BACKWARD,
    LSE,
    Flags,
    ReductionOptions,
    TrainingOptions,
    Wants,
    accepts,
    names_of,
)
from .passes import PassKey, alone, later_spec, size_to_save, spec_of, stats_of, writes

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.custom_derivatives import SymbolicZero
except ImportError as error:
    raise ImportError("logitless.jax needs jax 0.10 or newer, which is not installed") from error
if jax.__version_info__ < (0, 10):
    raise ImportError(f"logitless.jax needs jax 0.10 or newer, got {jax.__version__}")

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from typing_extensions import Unpack

    Axes = str | tuple[str, ...] | None

__all__ = ["LinearCrossEntropyOutput", "linear_cross_entropy"]

Arrays = dict[str, Any]  # by the names of tensors.def
GRADIENTS = ("hidden", "weight", "bias")
_TARGET = f"{native.NAMESPACE}_run"  # of the foreign function
_TF32 = (None, "default", "bfloat16", "tensorfloat32", "TF32_TF32_F32")  # values of jax_default_matmul_precision


class LossOptions(ReductionOptions, TrainingOptions, total=False):
    """As in logitless.options, with arrays."""

    bias: ArrayLike | None
    class_weight: ArrayLike | None
    temperature: ArrayLike
    token_weight: ArrayLike | None
    target_weight: ArrayLike | None
    num_items: ArrayLike | None
    differentiable_stats: bool
    seed: ArrayLike | None
    platform: str | None
    token_axis: Axes
    vocab_axis: Axes


_MORE: dict[str, Any] = dict.fromkeys(("platform", "token_axis", "vocab_axis"))

_namedtuple: Any = collections.namedtuple  # its names are computed, so no type checker knows them
_Output: Any = _namedtuple("_Output", ("loss", *_options.STAT_NAMES), defaults=[None] * len(_options.STAT_NAMES))


class LinearCrossEntropyOutput(_Output):  # type: ignore[misc]
    """The loss and the statistics that ``return_stats`` requested; the others are None.

    They are those of :class:`logitless.LinearCrossEntropyOutput`. Integers are int32 unless ``jax_enable_x64`` is set.
    """

    __slots__ = ()


@accepts(LossOptions, **_MORE)
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    *,
    return_stats: bool | Sequence[str] = False,
    **options: Unpack[LossOptions],
) -> Any:
    """Computes the cross entropy of ``softmax(hidden @ weight.T)`` without holding the logits.

    The formulas and all options not listed here are those of :func:`logitless.linear_cross_entropy`. Numbers are
    constants of compiled code, except for ``num_items`` and a ``temperature`` of each row.

    Args:
        hidden: Hidden states, ``[..., D]``.
        weight: The head's weight, ``[V, D]``.
        targets: Class indices, int32 or int64, ``[...]``, or ``[..., K]`` with ``target_weight`` and K <= 64.
        bias: Added to the logits, ``[V]``.
        temperature: A number, or an array of shape ``hidden.shape[:-1]``.
        seed: A key of ``jax.random``, or an integer. Sparsified gradients need one.
        compute_dtype: The dtype to which hidden and weight are rounded for the products, a part at a time; or
            ``"fp8"`` as there.
        platform: ``"cpu"`` or ``"cuda"``, where compiled code will run. None means that of committed arrays, or the
            default where they are traced.
        token_axis: Under ``jax.shard_map``, the mesh axes over which tokens are cut. A reduced loss is that of all
            tokens.
        vocab_axis: Under ``jax.shard_map``, the mesh axes over which the rows of weight and bias are cut, in equal
            parts. ``class_weight`` is that of the whole vocabulary.
        return_stats: As in :func:`logitless.linear_cross_entropy`.

    Returns:
        The loss in float32 (float64 for float64 inputs). It is a scalar, or has the shape ``hidden.shape[:-1]`` with
            reduction "none". With ``return_stats`` the result is a :class:`LinearCrossEntropyOutput`.

    Raises:
        TypeError, ValueError: An argument has the wrong type, dtype, shape or range, or a gradient of it was asked for
            that there is not.
        BudgetTooSmallError: No plan fits ``max_workspace_bytes``, in one of the two passes.
        jax.errors.JaxRuntimeError: On the CPU, a target is outside ``[0, V)``. On CUDA its loss is NaN.
        NotImplementedError: The derivative of a gradient, forward-mode differentiation, or a platform without plans.
    """
    o = _options.filled("linear_cross_entropy", names_of(LossOptions), options, _MORE)
    head = _prepared(_gathered(hidden), _gathered(weight), _gathered(targets), o, return_stats)
    outputs = _of_shards(head) if o["vocab_axis"] else _of_whole(head)
    rows = head.rows
    loss = outputs["loss"].reshape(rows) if o["reduction"] == "none" else outputs["loss"]
    if return_stats is False:
        return loss
    stats = {name: outputs[name] for name in head.names}
    for name, value in stats.items():
        value = value if name in _options.COUNTS else value.reshape(rows)
        value = value.astype(int) if value.dtype == np.int64 else value  # int32 without x64
        stats[name] = value if o["differentiable_stats"] else jax.lax.stop_gradient(value)
    return LinearCrossEntropyOutput(loss, **stats)


# ---- preparation


def _gathered(value: ArrayLike) -> Array:
    """Returns an array that is whole on each device, as far as its type says how a mesh cuts it.

    Under jax.jit XLA gathers the operands of a foreign function. Where axes of a mesh are explicit, types must say it.
    """
    array = jnp.asarray(value)
    place = jax.typeof(array).sharding
    if any(place.spec):
        array = jax.sharding.reshard(array, jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec()))
    return array


class _Head(NamedTuple):
    """A call's arguments after checks.

    Attributes:
        arrays: By the names of tensors.def, with one dimension for rows.
        o: The options as they were given.
        names: The requested statistics.
        rows: The shape of outputs of rows.
        several: Whether rows have several targets.
    """

    arrays: Arrays
    o: dict[str, Any]
    names: tuple[str, ...]
    rows: tuple[int, ...]
    several: bool


def _prepared(hidden: Array, weight: Array, targets: Array, o: dict[str, Any], return_stats: Any) -> _Head:
    rows, several = hidden.shape[:-1], _options.has_several_targets(o, hidden, targets)
    bias = None if o["bias"] is None else _gathered(o["bias"])
    operands = {"hidden": hidden, "weight": weight, "bias": bias}
    _options.check_arrays(np.float64, operands, "targets", targets, several)
    for name in ("differentiable_stats", "recompute_logits"):
        _options.flag(name, o[name])
    ignored = _options.target_of_none(o["ignore_index"])
    limits = np.iinfo(targets.dtype)
    if not limits.min <= ignored <= limits.max:
        # Without x64 JAX has cut off the upper bits of targets, so they are another class.
        raise ValueError(f"ignore_index: expected an integer of {targets.dtype}, the dtype of targets, got {ignored}")
    arrays = {"hidden": hidden.reshape(-1, weight.shape[1]), "weight": weight}
    arrays["targets"] = targets.reshape(-1, targets.shape[-1]) if several else targets.reshape(-1)
    if bias is not None:
        arrays["bias"] = bias

    def add(name: str, shape: tuple[int, ...], meaning: str) -> None:
        if o[name] is None:
            return
        array = _gathered(o[name])
        _options.check_shape(name, array.shape, shape, meaning)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(f"{name}: expected real numbers, got {array.dtype}")
        array = _constant(name, array.astype(stats_of(hidden)))
        arrays[name] = array.reshape(arrays["targets"].shape) if name == "target_weight" else array.ravel()

    of_rows = "one for each row" if several else "that of targets"
    _check_axes(o["token_axis"], o["vocab_axis"], weight)
    add("class_weight", (weight.shape[0] * _axis_size("vocab_axis", o["vocab_axis"]),), "V")
    add("token_weight", rows, of_rows)
    add("target_weight", targets.shape, "that of targets")
    if np.ndim(o["temperature"]) > 0:
        add("temperature", rows, f"{of_rows}, or a number")
    if o["reduction"] == "mean" and isinstance(o["num_items"], (jax.Array, np.ndarray)):
        add("num_items", (), "a number")
        arrays["num_items"] = arrays["num_items"].reshape(())
    _options.check_seed_is_used(o["seed"], o["gradient"])
    if o["gradient"] != "exact":
        arrays["seed"] = _seed(o["seed"])
    return _Head(arrays, o, _options.stats_names(return_stats, o["gradient"], o["screen"], several), rows, several)


def _seed(seed: Any) -> Array:
    """Returns 64 bits, which the library reads as an int64, in two words: JAX may lack 64-bit integers."""
    if seed is None:
        raise ValueError("seed: expected a key of jax.random or an integer with sparsified gradients, got None")
    if isinstance(seed, (int, np.integer)):
        return jnp.asarray(np.asarray(_options.integer("seed", seed), np.int64).reshape(1).view(np.uint32))
    array = jnp.asarray(seed)
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if is_key and array.shape == () or array.dtype == np.uint32 and array.ndim == 1:
        return jax.random.bits(array, (2,), np.uint32)
    if is_key or not jnp.issubdtype(array.dtype, jnp.integer) or array.shape != ():
        raise TypeError(f"seed: expected a key of jax.random or an integer, got {array.dtype}{list(array.shape)}")
    return jnp.stack([array, array >> 31 >> 1]).astype(np.uint32)


def _place(platform: str | None, arrays: Iterable[Any]) -> int:
    """Returns the device that plans are made for: native.HOST, or the ordinal of a CUDA device."""
    if platform is None:  # as JAX chooses: committed arrays decide, else the default device
        known = (array for array in arrays if not isinstance(array, jax.core.Tracer) and array.committed)
        default = jax.config.jax_default_device or jax.default_backend()
        device = next((device for array in known for device in array.devices()), default)
        platform = getattr(device, "platform", device)
    if platform in ("gpu", "cuda"):
        try:
            return int(jax.local_devices(backend="gpu")[0].local_hardware_id)
        except RuntimeError as error:
            raise UnsupportedError(
                f"platform: expected one whose devices JAX sees, got {platform!r} ({error})"
            ) from None
    if platform != "cpu":
        raise UnsupportedError(f'platform: expected "cpu" or "cuda", got {platform!r}')
    return native.HOST


# ---- passes


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call without its arrays. XLA's compiled code depends on it."""

    options: tuple[tuple[str, Any], ...]  # of the library, resolved
    names: tuple[str, ...]  # statistics to return
    differentiable: bool  # whether they may have gradients
    recompute: bool
    device: int
    threads: int
    of_shard: bool = False  # whether the vocabulary is a part of a larger one

    def flags(self) -> Flags:
        names = self.names
        stats = (*names, "argmax") if "correct_count" in names else names
        counts = any(name in _options.COUNTS for name in names)
        return Flags(want_counts=counts, stats=_options.stats_of_rows(stats))

    def plan(self, spec: native.Spec) -> native.Plan:
        return native.plan_of(spec, self.threads, None, self.device)

    def run(self, pass_key: PassKey, read: Arrays, saved_bytes: int = 0) -> Arrays:
        """Runs a pass, and returns the arrays that it writes."""
        options = dict(self.options)
        more = {"saved_bytes": saved_bytes} if saved_bytes else {}
        spec = spec_of(pass_key, read, options, **more)
        info = self.plan(spec).info
        results = {name: (shape, dtype) for name, (shape, dtype, _) in writes(pass_key, read, options).items()}
        if "saved" in results:
            results["saved"] = ((info.saved_bytes,), "uint8")
        if pass_key.kind != BACKWARD:
            results |= {name: ((), "int64") for name in _options.COUNTS if name in self.names}
        elif self.device == native.HOST and "saved" in read:
            # The pass changes elements while it runs, and XLA runs calls on the host side by side: it needs a copy
            # where others read the array. On CUDA they follow one another on a stream.
            results["saved"] = (read["saved"].shape, "uint8")
        results["workspace"] = ((info.workspace_bytes,), "uint8")
        written = _foreign(self._problem(spec), tuple(read), tuple(results.items()), *read.values())
        return dict(zip(results, written))

    def _problem(self, spec: native.Spec) -> tuple[int, ...]:
        """Returns the attribute "problem" of the library's handlers (src/api/xla_ffi.cpp)."""
        options, option_count, tensors, tensor_count = spec.to_c()
        numbers = [self.device != native.HOST, self.threads, option_count]
        for option in options:
            numbers += [option.id, option.integer, *struct.unpack("q", struct.pack("d", option.real))]
        numbers.append(tensor_count)
        for tensor in tensors:
            numbers += [tensor.id, tensor.dtype, tensor.accumulate]
        return tuple(numbers)


@functools.lru_cache(maxsize=1)
def _register() -> None:
    lib = native.library()
    for handler, platform in ((lib.logitless_xla_cpu, "cpu"), (lib.logitless_xla_cuda, "CUDA")):
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform=platform)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _foreign(problem: tuple[int, ...], names: tuple[str, ...], results: tuple[Any, ...], *arrays: Array) -> list[Array]:
    _register()
    place: dict[str, Any] = {}
    if varying := _varying(arrays):
        whole = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
        place = {"sharding": whole, "manual_axis_type": jax.sharding.ManualAxisType(varying=varying)}
    known = native.schema().tensors
    ids = [known[name]["id"] for name in names] + [-1 if n in names else known[n]["id"] for n, _ in results[:-1]]
    call: Any = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(shape, np.dtype(dtype), **place) for _, (shape, dtype) in results],
        input_output_aliases={names.index(n): i for i, (n, _) in enumerate(results) if n in names},
        vmap_method="sequential",
    )
    written: list[Array] = call(*arrays, problem=np.array(problem, np.int64), tensors=np.array(ids, np.int64))
    return written


def _refuse_derivatives(*_: Any) -> Any:
    raise NotImplementedError(
        "logitless.jax.linear_cross_entropy: double backward and forward-mode differentiation are not supported"
    )


_foreign.defjvp(_refuse_derivatives)


def _primal(call: _Call, arrays: Arrays) -> Arrays:
    """Runs a call, and returns the loss and the statistics by name."""
    screens = dict(call.options)["screen"] != "none"
    read = {name: array for name, array in arrays.items() if name != "seed" or screens}
    return _named(call, call.run(PassKey(FORWARD, call.flags()), read), arrays)


def _named(call: _Call, outputs: Arrays, arrays: Arrays) -> Arrays:
    """Returns the outputs of a call. Statistics of the draw need a pass of their own where there is no gradient yet."""
    missing = [name for name in DRAW_STATS if name in call.names and name not in outputs]
    if missing:
        flags = Flags(want_d_hidden=True, want_draw_stats=True)
        outputs = call.run(PassKey(FORWARD_BACKWARD, flags), jax.lax.stop_gradient(arrays)) | outputs
    return {name: outputs[name] for name in ("loss", *call.names)}


def _forward(call: _Call, given: dict[str, Any]) -> tuple[Arrays, Any]:
    arrays = {name: each.value for name, each in given.items()}
    return _first_pass(call, arrays, tuple(name for name, each in given.items() if each.perturbed))


def _first_pass(call: _Call, arrays: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Any]:
    if not wanted:
        return _primal(call, arrays), (dict.fromkeys(arrays), None)
    wants = Wants(*(name in wanted for name in GRADIENTS))
    options, flags = dict(call.options), call.flags()
    stats_later = call.differentiable and any(name in DIFFERENTIABLE for name in call.names)
    half = any(arrays[name].dtype == np.float16 for name in wanted)
    if options["screen"] != "none":
        _options.check_together(options["reduction"], None, half, stats_later)
    if not (stats_later or half or options["reduction"] == "none"):
        draws = any(name in DRAW_STATS for name in call.names)
        flags = flags.with_gradients(wants)._replace(want_draw_stats=draws)
        outputs = call.run(PassKey(FORWARD_BACKWARD, flags), arrays)
        gradients = {name: outputs[f"d_{name}"] for name in wanted}
        return _named(call, outputs, arrays), ({name: gradients.get(name) for name in arrays}, None)
    sparsified = options["gradient"] != "exact"
    saves = sparsified or (call.device != native.HOST and not call.recompute)
    stats = _options.stats_of_rows((*flags.stats, "lse"))
    key = PassKey(FORWARD, flags._replace(stats=stats, saves=saves).with_gradients(wants))
    size = _size_to_save(call, key, arrays)
    outputs = call.run(alone(key), arrays, size)
    kept = {name: outputs[name] for name in (*LSE, "entropy", "saved") if name in outputs}
    return _named(call, outputs, arrays), (arrays | kept, dict.fromkeys(wanted))


def _size_to_save(call: _Call, key: PassKey, read: Arrays) -> int:
    """Returns the size of saved exp logits, and raises if one of the two passes does not fit the budget."""
    options, size = dict(call.options), 0

    def later(budget: int, size: int = FASTEST) -> native.Plan:
        more = {"saved_bytes": size} if size else {}
        return call.plan(later_spec(key, read, options | {"max_workspace_bytes": budget}, **more))

    def now(size: int) -> native.Plan:
        return call.plan(spec_of(alone(key), read, options, **({"saved_bytes": size} if size else {})))

    budget = options["max_workspace_bytes"]
    if key.flags.saves and options["gradient"] != "always-sparsified":
        size = size_to_save(budget, later, now)
    native.enough(lambda: now(size), lambda: later(budget, size))
    return size


def _backward(call: _Call, residuals: Any, upstream: Arrays) -> tuple[Arrays]:
    kept, later = residuals
    able = {name: ct for name, ct in upstream.items() if name in ("loss", *DIFFERENTIABLE)}
    known = {name: ct for name, ct in able.items() if not isinstance(ct, SymbolicZero)}
    nothing = {name: None for name in kept if name not in _options.SAVED}
    if not known or (later is None and "loss" not in known):
        return (nothing,)
    if later is None:
        return ({name: None if g is None else _scaled(g, known["loss"]) for name, g in kept.items()},)
    if "loss" not in known:
        known["loss"] = jnp.zeros(upstream["loss"].shape, kept["lse"].dtype)
    read = {name: array for name, array in kept.items() if name != "entropy" or name in known}
    read |= {f"grad_{name}": value for name, value in known.items()}
    if call.of_shard:  # a row with all its probabilities in other shards has no gradient here
        nowhere = jnp.isneginf(read["lse"])
        read |= {name: jnp.where(nowhere, 0, read[name]) for name in (*LSE, "entropy") if name in read}
    flags = Flags(saves="saved" in kept).with_gradients(Wants(*(name in later for name in GRADIENTS)))
    outputs = call.run(PassKey(BACKWARD, flags), read, kept["saved"].size if "saved" in kept else 0)
    return (nothing | {name: outputs[f"d_{name}"] for name in later},)


def _scaled(gradient: Array, loss: Array) -> Array:
    """Multiplies by the loss's upstream gradient. Zeros, as rows without a target have, stay zeros.

    XLA drops all of it where the factor is the constant 1.
    """
    product = (gradient.astype(loss.dtype) * loss).astype(gradient.dtype)
    return jnp.where(jnp.isfinite(loss), product, jnp.where(gradient == 0, gradient, product))


_passes = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_passes.defvjp(_forward, _backward, symbolic_zeros=True)
# jax.shard_map does not say which gradients are wanted, so these passes make all of them.
_passes_of_mesh = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_passes_of_mesh.defvjp(
    lambda call, arrays: _first_pass(call, arrays, tuple(name for name in GRADIENTS if name in arrays)), _backward
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name: str, array: Array) -> Array:
    """Returns an array that has no gradient, and refuses to be differentiated."""
    return array


def _refuse_gradient(name: str, *_: Any) -> Any:
    raise ValueError(
        f"{name}: expected an array without a gradient, as jax.lax.stop_gradient gives, got one that is differentiated"
    )


_constant.defjvp(_refuse_gradient)


# ---- meshes


def _axis_size(name: str, axes: Axes) -> int:
    """Checks the mesh axes of an argument, and returns the number of devices along them."""
    if not axes:
        return 1
    try:
        checked = jax.typeof(jax.lax.axis_index(axes)).mat.varying
    except NameError as error:
        raise ValueError(f"{name}: expected mesh axes of jax.shard_map, got {axes!r} ({error})") from None
    if not checked:
        raise UnsupportedError(f"{name}: expected jax.shard_map with check_vma=True, which sums gradients, got False")
    return int(jax.lax.axis_size(axes))


def _check_axes(token_axis: Axes, vocab_axis: Axes, weight: Array) -> None:
    """Refuses axes that cannot cut what they are named for: losses would be wrong, and nothing else would show it."""
    tokens, vocab = ({axes} if isinstance(axes, str) else set(axes or ()) for axes in (token_axis, vocab_axis))
    _axis_size("token_axis", token_axis)
    if both := sorted(tokens & vocab):
        raise ValueError(f"vocab_axis: expected mesh axes other than those of token_axis, got {both} in both")
    if _axis_size("vocab_axis", vocab_axis) > 1 and (whole := sorted(vocab - jax.typeof(weight).mat.varying)):
        raise ValueError(f"vocab_axis: expected mesh axes that cut weight, got {whole}, over which it is the same")


def _varying(arrays: Iterable[Array]) -> frozenset[str]:
    """Returns the mesh axes over which one of the arrays differs, as far as jax.shard_map checks that."""
    return frozenset().union(*(jax.typeof(array).mat.varying for array in arrays))


def _alike(arrays: Arrays) -> Arrays:
    """Marks all arrays as different over the same mesh axes. So the gradient of one that is not is summed over them."""
    axes = _varying(arrays.values())
    missing = {name: tuple(sorted(axes - jax.typeof(array).mat.varying)) for name, array in arrays.items()}
    return {name: jax.lax.pcast(array, missing[name], to="varying") for name, array in arrays.items()}


def _equal(arrays: Arrays, axes: str | tuple[str, ...]) -> Arrays:
    """Marks arrays without a gradient as equal over mesh axes.

    Those that jax.lax.all_gather returns are equal, but their types say that they differ. The loss's type would say so
    too. A gradient inside the map would then be that of the sum of all devices' losses.
    """
    known = {axes} if isinstance(axes, str) else set(axes)
    equal = {}
    for name in arrays.keys() & {"targets", "token_weight", "class_weight", "target_weight", "num_items"}:
        differs = tuple(sorted(known & jax.typeof(arrays[name]).mat.varying))
        equal[name] = jax.lax.pmax(arrays[name], differs) if differs else arrays[name]
    return arrays | equal


def _call_of(head: _Head) -> tuple[_Call, Arrays]:
    """Returns a call for the arrays as they are, and its arrays."""
    o, arrays = dict(head.o), dict(head.arrays)
    if "temperature" in arrays:
        o["temperature"] = 1.0
    if "num_items" in arrays:
        o["num_items"] = None
    code = F32
    if not _options.is_choice(o["compute_dtype"], _options.COMPUTE_DTYPES):
        code, o["compute_dtype"] = _options.float_code("compute_dtype", o["compute_dtype"]), None
    options = _options.make_options(o, head.rows[-1] if head.rows else 1, code)
    if options["num_items"] == 0:  # the option 0 would mean none
        arrays["num_items"] = jnp.zeros((), stats_of(arrays["hidden"]))
    device, threads = _place(o["platform"], arrays.values()), default_threads()
    if device != native.HOST:  # as XLA's own products of float32
        threads, options["allow_tf32"] = 1, jax.config.jax_default_matmul_precision in _TF32
    flags = o["differentiable_stats"], o["recompute_logits"]
    made = _Call(tuple(options.items()), head.names, *flags, device, threads, o.get("of_shard", False))
    return made, arrays


def _check_options(head: _Head) -> None:
    """Has the library check options with which JAX computes."""
    call, arrays = _call_of(head)
    call.plan(spec_of(PassKey(FORWARD, call.flags()), arrays, dict(call.options) | {"max_workspace_bytes": 0}))


def _of_head(head: _Head) -> Arrays:
    made, arrays = _call_of(head)
    passes = _passes_of_mesh if jax.sharding.get_abstract_mesh().manual_axes else _passes
    outputs: Arrays = passes(made, _alike(arrays))
    return outputs


def _of_whole(head: _Head) -> Arrays:
    o, axis = head.o, head.o["token_axis"]
    if not axis or o["reduction"] == "none":
        return _of_head(head)
    _check_options(head)
    if o["reduction"] == "mean" and o["num_items"] is None:
        targets, valid = _targets(head)
        items = jax.lax.psum(_weights(head, targets, valid).sum(), axis)
        head = head._replace(arrays=head.arrays | {"num_items": items})
    outputs = _of_head(head)
    return outputs | {"loss": jax.lax.psum(outputs["loss"], axis)}


def _shifted(head: _Head, values: Array, fill: int) -> Array:
    """Returns targets or their weights where the shift has moved them. fill: for rows without a target."""
    shift, length = head.o["shift"], head.rows[-1] if head.rows else 1
    if not shift or not values.size:
        return values
    sequences = values.reshape(-1, length, *values.shape[1:])[:, shift:]
    padding = [(0, 0), (0, length - sequences.shape[1]), *[(0, 0)] * (values.ndim - 1)]
    return jnp.pad(sequences, padding, constant_values=fill).reshape(values.shape)


def _targets(head: _Head) -> tuple[Array, Array]:
    """Returns the targets of each row, and whether there are any."""
    ignored = _options.target_of_none(head.o["ignore_index"])
    targets = _shifted(head, head.arrays["targets"], ignored)
    return targets, targets != ignored


def _weights(head: _Head, targets: Array, valid: Array) -> Array:
    """Returns the weight of each row in the divisor of the mean: that of its token times that of its class."""
    weights = head.arrays.get("token_weight", jnp.ones(len(targets), stats_of(head.arrays["hidden"])))
    if "class_weight" in head.arrays:
        weights = weights * head.arrays["class_weight"][jnp.where(valid, targets, 0)]
    return jnp.where(valid.any(-1) if head.several else valid, weights, 0)


def _of_shards(head: _Head) -> Arrays:
    """Returns the outputs of a vocabulary that is cut over mesh axes.

    Each device computes the statistics of its own classes as those of a whole vocabulary. JAX merges them, and
    differentiates the merge: the gradient of the whole lse reaches a shard's lse times the shard's probability.
    """
    o, axis = head.o, head.o["vocab_axis"]
    if o["gradient"] != "exact":
        raise UnsupportedError(f'gradient: expected "exact" with vocab_axis, got {o["gradient"]!r}')
    _check_options(head)
    head = head._replace(arrays=_equal(head.arrays, axis))
    arrays = dict(head.arrays)
    classes, stats = arrays["weight"].shape[0], stats_of(arrays["hidden"])
    total, start = classes * jax.lax.axis_size(axis), jax.lax.axis_index(axis) * classes
    targets, valid = _targets(head)
    known = (targets >= 0) & (targets < total)
    own = valid & (targets >= start) & (targets < start + classes)
    # -1 is the ignored class. A target in another shard stands for class 0, whose logit is left out below.
    arrays["targets"] = jnp.where(valid, jnp.where(own, targets - start, jnp.where(known, 0, total)), -1)
    token_weight, class_weight = (arrays.pop(name, None) for name in ("token_weight", "class_weight"))
    smoothing = o["label_smoothing"]
    of_classes = jnp.ones(classes, stats)
    if class_weight is not None and smoothing:
        of_classes = arrays["class_weight"] = jax.lax.dynamic_slice(class_weight, (start,), (classes,))
    weight: Any = 1
    if head.several:
        weights = _shifted(head, arrays["target_weight"], 0)
        arrays["target_weight"], weight = jnp.where(own, weights, 0), jnp.where(valid, weights, 0).sum(-1)
    wants_argmax = not {"argmax", "is_top1", "correct_count"}.isdisjoint(head.names)
    needed = {"lse", "target_logit", *head.names} - {"nll", "is_top1", *_options.COUNTS}
    needed |= {"argmax", "max_logit"} if wants_argmax else set()
    inner = {
        "reduction": "none",
        "ignore_index": -1,
        "label_smoothing": float(smoothing > 0),
        "z_loss": 0.0,
        "shift": 0,
        "of_shard": True,
    }
    num_items = arrays.pop("num_items", o["num_items"])
    part = _of_head(_Head(arrays, o | inner | {"num_items": None}, tuple(sorted(needed)), head.rows, head.several))

    def add(values: Array) -> Array:
        return jax.lax.psum(values, axis)

    def largest(values: Array) -> Array:
        return jax.lax.pmax(jax.lax.stop_gradient(values), axis)

    most = largest(part["lse"])
    # A row whose probabilities are all in other shards has logits of -inf here. Its statistics would make sums NaN.
    nowhere = jnp.isneginf(part["lse"]) & (most > -jnp.inf)
    absent = {"lse": -1e18, "entropy": 0, "log_sum_sq_probs": 0}  # products with upstream gradients stay finite
    part |= {name: jnp.where(nowhere, absent[name], part[name]) for name in part.keys() & absent.keys()}
    lse = most + jnp.log(add(jnp.exp(part["lse"] - most)))
    below = part["lse"] - lse  # log of the shard's probability
    target_logit = add(part["target_logit"] if head.several else jnp.where(own, part["target_logit"], 0))
    wrong = valid & ~known
    nll = jnp.where(wrong.any(-1) if head.several else wrong, jnp.nan, weight * lse - target_logit)
    loss = nll if class_weight is None else class_weight[jnp.where(known, targets, 0)] * nll
    if smoothing:
        spread = add(classes * part["loss"] - of_classes.sum() * below)
        loss = (1 - smoothing) * loss + smoothing / total * spread
    loss = (loss + o["z_loss"] * lse**2) * (1 if token_weight is None else token_weight)
    outputs = {"nll": nll, "lse": lse, "target_logit": target_logit, "max_logit": 0, "loss": loss}
    if "entropy" in needed:
        outputs["entropy"] = lse - add(jnp.exp(below) * (part["lse"] - part["entropy"]))
    if "mean_logit" in needed:
        outputs["mean_logit"] = add(part["mean_logit"]) * (classes / total)
    if "log_sum_sq_probs" in needed:
        log_sums = 2 * below + part["log_sum_sq_probs"]
        outputs["log_sum_sq_probs"] = (most := largest(log_sums)) + jnp.log(add(jnp.exp(log_sums - most)))
    if "max_logit" in needed:
        nan = jnp.isnan(part["max_logit"])
        outputs["max_logit"] = largest(part["max_logit"]) + add(jnp.where(nan, part["max_logit"], 0))
    counts = valid.any(-1) if head.several else valid
    outputs = {name: jnp.where(counts, value, 0) for name, value in outputs.items()}
    if wants_argmax:
        # The first NaN is the largest logit, as in a whole vocabulary.
        best = nan | (part["max_logit"] == outputs["max_logit"])
        ids = jnp.where(best, part["argmax"].astype(int) + start, total)
        argmax = outputs["argmax"] = jnp.where(counts, jax.lax.pmin(ids, axis), -1)
        if not head.several:
            top = outputs["is_top1"] = counts & (argmax == targets)
            outputs["correct_count"] = top.sum()
    outputs["valid_count"] = counts.sum()
    outputs |= {name: jax.lax.stop_gradient(outputs[name]) for name in _options.CONSTANT if name in outputs}
    if o["reduction"] == "none":
        return outputs
    tokens = o["token_axis"] or ()
    loss = outputs["loss"].sum()
    if o["reduction"] == "mean":
        items = jax.lax.psum(_weights(head, targets, valid).sum(), tokens) if num_items is None else num_items
        loss = loss / items
    return outputs | {"loss": jax.lax.psum(loss, tokens)}
