"""Runs a prepared call by one autograd function. In eager mode it runs the library directly, else through one operator,
which PyTorch's compilers, modes and transforms see.

``torch.ops.logitless.run`` is a pass over tensors that its text argument names; a copy of this package under another
name has a namespace of its own. ``run_into`` is a backward pass that
adds the gradient of the weight to a buffer. Neither has a formula of autograd, as the function serves both ways: a
forward pass that torch.utils.checkpoint computes again may go the other way. A new option changes no schema.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import options as _options
from .call import (
    Arguments,
    Learned,
    Prepared,
    PreparedCall,
    Ranks,
    are_off,
    are_plain,
    inputs_of,
    pack_numbers,
    seed_tensor,
)
from .native import NAMESPACE
from .options import DRAW_STATS, SAVED, Flags
from .passes import GRADIENTS, PassKey, Result, results
from .run import (
    Tensors,
    check_own_memory,
    find,
    find_forward,
    read_as_they_are,
    readable,
    resolve_options,
    run_pass,
    saved_size,
    scale_in_place,
    unpack_numbers,
)

if TYPE_CHECKING:
    from .screened import ScreenedWeight

Outputs = dict[str, Tensor]  # by the names of results()
_PASS_NAMES = ("forward", "backward", "forward_backward")  # index: PassKey.kind


# ---- other passes: logitless.distributed and logitless._divergence register theirs here


class OtherPasses(NamedTuple):
    """Passes of ranks, or of a function for which the library has no pass. Their tensors have names of their own."""

    run: Callable[[PassKey, dict[str, Tensor], Tensor | None, Any], Tensors]
    results: Callable[[PassKey, Mapping[str, Any], Mapping[str, Any]], dict[str, Result]]
    flops: Callable[[PassKey, Mapping[str, Any]], int] | None = None  # takes shapes of tensors
    refuse: Callable[[Ranks, Exception], None] = lambda ranks, error: None  # reports it to the other ranks
    resolves: bool = False  # whether options are resolved before the run; else they are those of the call


other_passes: dict[str, OtherPasses] = {}  # by function; by of_group(function) for those of ranks
_LIBRARY = OtherPasses(run_pass, results, resolves=True)


def of_group(function: str) -> str:
    """Returns the name of a function's passes in a group of ranks."""
    return f"{function} of a group"


def _passes(pass_key: PassKey) -> OtherPasses:
    # A KeyError without logitless.distributed: the library's own pass would take a shard for the whole head.
    function = pass_key.function
    return other_passes.get(function, _LIBRARY) if pass_key.ranks is None else other_passes[of_group(function)]


# ---- the operator


_operators = getattr(torch.ops, NAMESPACE)
_SCHEMA = "float[] numbers, SymInt[] integers, str text"
_TEXTS = ("reduction", "gradient", "screen", "compute_dtype", "batch_invariant")  # options in the text
_INTEGERS = (*_options.INTEGERS, "vocab_start", "vocab_total")
_SWITCHES = Ranks._fields[Ranks._fields.index("sequence_parallel") :]  # bools


def _text(pass_key: PassKey, options: Mapping[str, Any], names: Iterable[str]) -> str:
    """Returns all that is no tensor and no number, by name, so that PyTorch's caches on disk cannot confuse calls."""
    flags, ranks = pass_key.flags, pass_key.ranks
    wants = [name for name, on in zip(Flags._fields[:-1], flags[:-1]) if on]
    fields = [f"{name}={options[name]}" for name in _TEXTS]
    fields += [f"pass={pass_key.kind}", f"function={pass_key.function}"]
    fields += [f"wants={','.join(wants)}", f"stats={','.join(flags.stats)}", f"tensors={','.join(names)}"]
    if ranks is not None:
        fields += [f"{name}={getattr(ranks, name)}" for name in ("group", "group_size", *_SWITCHES)]
    return "; ".join(fields)  # no line breaks: PyTorch writes it into a comment of generated code


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[PassKey, dict[str, Any], tuple[str, ...]]:
    """Returns the pass without the integers of its ranks, the options of _TEXTS and the names of the tensors."""
    fields = dict(line.split("=", 1) for line in text.split("; "))
    names = {name: tuple(filter(None, fields[name].split(","))) for name in ("wants", "stats", "tensors")}
    flags = Flags()._replace(**dict.fromkeys(names["wants"], True), stats=names["stats"])
    ranks = None
    if "group" in fields:
        switches = (fields[name] == "True" for name in _SWITCHES)
        ranks = Ranks(fields["group"], int(fields["group_size"]), -1, -1, *switches)
    options: dict[str, Any] = {name: fields[name] for name in _TEXTS}
    options["compute_dtype"] = int(fields["compute_dtype"])
    options["batch_invariant"] = fields["batch_invariant"] == "True"
    return PassKey(int(fields["pass"]), flags, fields["function"], ranks), options, names["tensors"]


def _unpacked(
    tensors: Sequence[Tensor], numbers: Sequence[float], integers: Sequence[Any], text: str
) -> tuple[PassKey, dict[str, Tensor], dict[str, Any]]:
    """Returns the pass, its tensors by name, and the options as given, with the list of numbers."""
    pass_key, options, names = _parsed(text)
    whole = dict(zip(_INTEGERS, integers, strict=True))
    if pass_key.ranks is not None:
        ranks = pass_key.ranks._replace(vocab_start=int(whole["vocab_start"]), vocab_total=int(whole["vocab_total"]))
        pass_key = pass_key._replace(ranks=ranks)
    options = {**options, "numbers": numbers, **{name: whole[name] for name in _options.INTEGERS}}
    return pass_key, dict(zip(names, tensors, strict=True)), options


def _run(
    tensors: Sequence[Tensor], main_grad: Tensor | None, numbers: Sequence[float], integers: Sequence[Any], text: str
) -> dict[str, Tensor]:
    pass_key, given, options = _unpacked(tensors, numbers, integers, text)
    passes, main_grad = _passes(pass_key), given.pop("main_grad", None) if main_grad is None else main_grad
    if passes.resolves:
        try:
            options = resolve_options(given, options)
        except Exception as error:
            if pass_key.ranks is not None and pass_key.kind != _options.BACKWARD:
                passes.refuse(pass_key.ranks, error)
            raise
    return passes.run(pass_key, given, main_grad, options)


def _fake(tensors: Sequence[Tensor], numbers: Sequence[float], integers: Sequence[Any], text: str) -> Outputs:
    pass_key, given, options = _unpacked(tensors, numbers, integers, text)
    outputs = _passes(pass_key).results(pass_key, given, options)
    if pass_key.flags.saves and pass_key.kind == _options.FORWARD:
        # Its size needs a plan, which makes symbolic sizes constants of the graph.
        size = saved_size(pass_key, given, given.pop("main_grad", None), unpack_numbers(options, None))
        outputs["saved"] = outputs["saved"]._replace(shape=(size,))
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device or tensors[0].device)
        for name, (shape, dtype, device) in outputs.items()
    }


@torch.library.custom_op(f"{NAMESPACE}::run", mutates_args=(), schema=f"(Tensor[] tensors, {_SCHEMA}) -> Tensor[]")
def run(tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    outputs = _run(tensors, None, *rest)
    pass_key, given, options = _unpacked(tensors, *rest)
    return [outputs[name] for name in _passes(pass_key).results(pass_key, given, options)]


@run.register_fake
def _(tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return list(_fake(tensors, *rest).values())


# PyTorch cannot functionalize an operator that returns a list.
_INTO = tuple(name for name in GRADIENTS if name != "d_weight")


@torch.library.custom_op(
    f"{NAMESPACE}::run_into",
    mutates_args=("main_grad",),
    schema=f"(Tensor[] tensors, Tensor(a!) main_grad, {_SCHEMA}) -> ({', '.join(f'Tensor {name}' for name in _INTO)})",
)
def run_into(tensors: Sequence[Tensor], main_grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    outputs = _run(tensors, main_grad, *rest)
    return tuple(outputs[name] if name in outputs else tensors[0].new_empty((0,)) for name in _INTO)


@run_into.register_fake
def _(tensors: Sequence[Tensor], main_grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    outputs = _fake(tensors, *rest)
    return tuple(outputs[name] if name in outputs else tensors[0].new_empty((0,)) for name in _INTO)


def run_traced(
    pass_key: PassKey, tensors: Mapping[str, Tensor | None], options: Mapping[str, Any], main_grad: Tensor | None = None
) -> Outputs:
    """Runs a pass through the operator. options: with numbers as a list. main_grad: a backward pass adds to it."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    ranks = pass_key.ranks
    whole = [options[name] for name in _options.INTEGERS]
    whole += [-1, -1] if ranks is None else [ranks.vocab_start, ranks.vocab_total]
    rest = options["numbers"], whole, _text(pass_key, options, given)
    values = list(given.values())
    if main_grad is not None:
        outputs = _operators.run_into.default(values, main_grad, *rest)
        wants = pass_key.flags.wants()._replace(weight=False)
        return {name: outputs[_INTO.index(name)] for name, on in zip(GRADIENTS, wants) if on}
    return dict(zip(_passes(pass_key).results(pass_key, given, options), _operators.run.default(values, *rest)))


# ---- batches of upstream gradients: torch.vmap and autograd.grad(is_grads_batched=True)


_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def is_batched(tensor: Tensor | None) -> bool:
    """Whether a tensor is batched: it stands for one element of a batch."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:  # None, or traced
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    keys = torch._C._dispatch_keys(tensor)
    return not any(keys.has(device) for device in _DEVICES)


@run.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    """Runs the operator for one element of the batch after the other."""

    def element(value: Any, dim: Any, index: int) -> Any:
        if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [element(v, d, index) for v, d in zip(value, dim)]
        return value if dim is None else value.select(dim, index)

    each = [run(*(element(a, d, index) for a, d in zip(args, in_dims))) for index in range(info.batch_size)]
    stacked = [torch.stack(outputs) for outputs in zip(*each)]
    return stacked, [0] * len(stacked)


def for_each(compute: Callable[[dict[str, Any]], Outputs], upstream: dict[str, Any]) -> Outputs:
    """Computes for each of a batch of autograd.grad(is_grads_batched=True), as operators with lists take no batches."""
    batched = [value for value in upstream.values() if is_batched(value)]
    if not batched or torch._C._functorch.is_functorch_wrapped_tensor(batched[0]):
        return compute(upstream)
    # A device's backward thread has its own count, which is 0. This vmap is the only one there, of level 1.
    level = max(torch._C._vmapmode_increment_nesting() - 1, 1)
    torch._C._vmapmode_decrement_nesting()
    plain = {
        name: torch._remove_batch_dim(value, level, 1, 0) if is_batched(value) else value
        for name, value in upstream.items()
    }
    count = max(len(plain[name]) for name in plain if is_batched(upstream[name]))
    parts = [
        compute({name: value[i] if is_batched(upstream[name]) else value for name, value in plain.items()})
        for i in range(count)
    ]
    return {name: torch._add_batch_dim(torch.stack([p[name] for p in parts]), 0, level) for name in parts[0]}


# ---- FLOP: 2 N V D for each matrix product
#
# Rows with ignore_index depend on data, so they count whether they are multiplied or not. Elements of sparsified
# gradients, a small part of the logits, do not count although they are multiplied.


def _flops(tensors: Any, *rest: Any, **_: Any) -> int:
    pass_key, options, names = _parsed(rest[-1])
    passes = _passes(pass_key)
    if passes.flops is not None:
        return passes.flops(pass_key, dict(zip(names, tensors)))
    tokens, size = tensors[0]
    product = 2 * int(tokens) * int(tensors[1][0]) * int(size)
    wants, exact = pass_key.flags.wants(), options["gradient"] == "exact"
    gradients = int(wants.hidden or wants.scale or wants.temperature) + int(wants.weight) if exact else 0
    if pass_key.kind == _options.BACKWARD:  # logits are computed again unless draws or exp logits were saved
        saved = math.prod(map(int, tensors[names.index("saved")])) if "saved" in names else 0
        exp_logits = int(tokens) * int(tensors[1][0]) * 2  # bytes, at least
        return (int(exact and saved < exp_logits) + gradients) * product
    return (1 + (gradients if pass_key.kind == _options.FORWARD_BACKWARD else 0)) * product


register_flop_formula((_operators.run, _operators.run_into))(_flops)


# ---- first passes


_DRAW_FLAGS = Flags(want_d_hidden=True, want_draw_stats=True)


def _first_pass(prepared: Prepared, learned: Learned) -> tuple[dict[str, Tensor], dict[str, Any], Outputs]:
    """Returns the inputs of a backward pass, its options, and the outputs of the first pass."""
    call, a, _, direct, screen = prepared
    if direct and call.reads is not None:
        return {}, {}, run_again(call, dict(zip(call.reads, a)))
    given = inputs_of(a, learned, call.trained)
    options: dict[str, Any] = call.options
    if not direct:
        options, numbers = call.packed
        given |= {} if numbers is None else {"numbers": numbers}
    device = a.hidden.device
    drawn = given | {"seed": seed_tensor(a.seed, device)} if call.draws or call.draw_stats else given
    if call.draws:
        given = drawn
    elif call.passes_over_draw and (a.seed is None or isinstance(a.seed, torch.Generator)):
        # Advances the generator as a draw does. The first pass of checkpoint(use_reentrant=True) has no gradients, and
        # its second pass leaves the generator where the first left it. Otherwise every step would draw the same.
        seed_tensor(a.seed, device)
    main_grad = a.main_grad if call.trained.weight else None
    if direct and call.pass_key.ranks is None:
        outputs = _run_eagerly(call, a, given, main_grad, screen)
    else:
        if direct:
            outputs = _passes(call.pass_key).run(call.pass_key, given, main_grad, options)
        else:
            read = given if call.trains else _constants(given)  # the operator has no autograd formula
            outputs = run_traced(call.pass_key, {**read, "main_grad": main_grad}, options)
    if call.draw_stats:
        outputs = outputs | _stats_of_draw(drawn, options, direct)
    return given, options, outputs


def _constants(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in given.items()}


def _stats_of_draw(given: dict[str, Tensor], options: dict[str, Any], direct: bool) -> Outputs:
    """Returns the statistics of the draw from a pass of its own, where the forward pass computes no gradients."""
    read = {name: value for name, value in _constants(given).items() if not name.startswith("learned_")}
    pass_key = PassKey(_options.FORWARD_BACKWARD, _DRAW_FLAGS)
    outputs = _LIBRARY.run(pass_key, read, None, options) if direct else run_traced(pass_key, read, options)
    return {name: outputs[name] for name in DRAW_STATS}


def _run_eagerly(
    call: PreparedCall, a: Arguments, given: dict[str, Tensor], main_grad: Tensor | None, screen: ScreenedWeight | None
) -> Outputs:
    """Runs the library directly. Remembers the run, and whether the library reads the arguments as they are."""
    if main_grad is not None:
        check_own_memory(main_grad, given)
    tensors = readable(given, call.options["num_items"])
    if screen is not None:
        return screen.run(call, tensors)
    if call.run is None:
        if call.pass_key.kind == _options.FORWARD:
            call.run = find_forward(call.pass_key, tensors, call.options, main_grad)
        else:
            call.run = find(call.pass_key, tensors, call.options)
        later = call.trains and not call.together
        if not (later or call.draws or call.draw_stats or call.passes_over_draw):
            call.reads = read_as_they_are(a, tensors)
    return run_again(call, tensors)


def run_again(call: PreparedCall, tensors: Tensors) -> Outputs:
    """Runs the pass that an earlier call found, on tensors that the library reads as they are."""
    if torch._C._autograd._profiler_enabled():
        with torch.profiler.record_function(f"logitless::{_PASS_NAMES[call.pass_key.kind]}"):
            return call.run(tensors)  # type: ignore[no-any-return]
    return call.run(tensors)  # type: ignore[no-any-return]


# ---- the function


def refuse_double_backward(function: str = "linear_cross_entropy") -> None:
    # Grad mode is on in a backward pass only with create_graph=True.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"logitless.{function}: double backward is not supported (its gradients are not differentiable); "
            "call backward or autograd.grad without create_graph=True"
        )


NOTHING: list[Tensor | None] = [None] * len(GRADIENTS)


class Head(torch.autograd.Function):
    """The passes of a prepared call. Gradients are computed with the loss, or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *_, scale, temperature, prepared = args
        call, a, _, direct, _ = prepared
        ctx.call, ctx.direct, ctx.shape = call, direct, a.hidden.shape
        if scale is not None or temperature is not None:
            ctx.places = [None if t is None else (t.device, t.dtype) for t in (scale, temperature)]
        if call.together:
            outputs = _first_pass(prepared, (scale, temperature))[2]
            ctx.save_for_backward(*map(outputs.get, GRADIENTS))
        else:
            given, ctx.options, outputs = _first_pass(prepared, (scale, temperature))
            ctx.names = (*given, *SAVED)
            # It is no saved tensor, as other backward passes may add to it before this one does.
            ctx.main_grad = a.main_grad if call.trained.weight else None
            ctx.save_for_backward(*given.values(), *map(outputs.get, SAVED))
        ctx.set_materialize_grads(False)
        if call.constant:
            ctx.mark_non_differentiable(*[outputs[name] for name in call.constant])
        return tuple([outputs[name] for name in call.outputs])

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        call = ctx.call
        refuse_double_backward(call.pass_key.function)
        if call.together:
            loss = upstream[0]
            gradients = NOTHING if loss is None else scaled_saved(ctx.saved_tensors, loss, ctx.direct)
        else:
            gradients = _later(ctx, upstream)
        d_hidden, d_weight, d_bias, d_scale, d_temperature = gradients
        if d_hidden is not None and len(ctx.shape) != 2:
            d_hidden = d_hidden.reshape(ctx.shape)
        if d_scale is not None:
            d_scale = d_scale.to(*ctx.places[0])
        if d_temperature is not None:
            d_temperature = d_temperature.to(*ctx.places[1])
        return d_hidden, d_weight, d_bias, d_scale, d_temperature, None


# PyTorch's own apply also looks for transforms of torch.func and for tensors of ended ones. can_run_eagerly() does so.
_apply: Any = super(torch.autograd.Function, Head).apply


def _needs_weight(ctx: Any) -> bool:
    """Whether the running backward pass needs the weight's gradient; true when in doubt.

    The pass of autograd.grad(loss, hidden) does not.
    """
    will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)
    edges: Any = getattr(ctx, "next_functions", ())
    node = edges[1][0] if len(edges) > 1 else None
    if will_run is None or node is None:
        return True
    try:
        return bool(will_run(node))
    except RuntimeError:  # raised for a leaf whose gradient autograd.grad returns
        return True


def _later(ctx: Any, upstream: Sequence[Any]) -> list[Tensor | None]:
    """Computes gradients in the backward pass; returns one, or None, for each of GRADIENTS."""
    given = {name: tensor for name, tensor in zip(ctx.names, ctx.saved_tensors) if tensor is not None}
    call, main_grad = ctx.call, ctx.main_grad
    pass_key = call.later
    if main_grad is not None and not torch.compiler.is_compiling() and not _needs_weight(ctx):
        pass_key, main_grad = pass_key._replace(flags=pass_key.flags._replace(want_d_weight=False)), None
    if not any(pass_key.flags.wants()) or all([gradient is None for gradient in upstream]):
        return NOTHING
    grads = dict(zip(call.outputs, upstream))
    lse: Any = given.get("lse")
    if pass_key.function == "linear_log_probs":
        # It is the gradient of a loss with the ids as weighted targets: sum_k q_k (lse - z_k) with q = -upstream.
        later = {"target_weight": -grads["target_log_probs"].to(lse.dtype), "grad_loss": lse.new_ones(())}
        pass_key = pass_key._replace(function="linear_cross_entropy")
    else:
        loss = grads["loss"]
        if loss is None:
            loss = lse.new_zeros(lse.shape if ctx.options["reduction"] == "none" else ())
        later = {"grad_loss": loss}
        later |= {f"grad_{name}": grads[name] for name in _options.DIFFERENTIABLE if grads.get(name) is not None}
    if ctx.main_grad is not None and any([is_batched(value) for value in later.values()]):
        raise NotImplementedError("main_grad: expected None with a batch of upstream gradients, got a tensor")
    read = given | later
    if ctx.direct and are_off() and are_plain((*read.values(), main_grad)):
        gradients = _passes(pass_key).run(pass_key, read, main_grad, ctx.options)
        if main_grad is not None and not main_grad.is_inference():
            torch.autograd.graph.increment_version(main_grad)  # as an operator does that mutates it
    else:
        options = ctx.options if "numbers" in ctx.options else pack_numbers(ctx.options, pass_key.flags.saves)[0]
        gradients = for_each(lambda upstream: run_traced(pass_key, given | upstream, options, main_grad), later)
    return [gradients.get(name) for name in GRADIENTS]


# Whether the running backward pass keeps the graph's saved tensors (retain_graph=True); true when in doubt.
_graph_is_kept: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _product(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiplies, and keeps zeros, as rows without a target have, even if the factor is infinite or NaN."""
    return torch.where(gradient == 0, gradient, gradient * factor)


def _products(gradients: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    """As _product for each gradient. May return the list itself, or write into its tensors, to save time."""
    # If the graph is not kept, nobody reads the saved tensors again, and they may become somebody's .grad.
    in_place = not _graph_is_kept()
    if factor.is_cuda:  # must not wait for the device
        device = factor.device  # a hook of saved tensors may have moved them or changed their layout
        if not all([gradient.device == device and gradient.is_contiguous() for gradient in gradients]):
            return [_product(gradient, factor) for gradient in gradients]
        scaled = gradients if in_place else [gradient.clone() for gradient in gradients]
        scale_in_place(scaled, factor)
        return scaled
    by = factor.item()
    if by == 1 and in_place:
        return gradients
    return [gradient * factor if math.isfinite(by) else _product(gradient, factor) for gradient in gradients]


def scaled_saved(saved: Sequence[Tensor | None], loss: Tensor, direct: bool) -> list[Tensor | None]:
    """Multiplies saved gradients by the loss's upstream gradient, which may be traced, batched or a negated view."""
    *gradients, d_scale, d_temperature = saved
    there = [gradient for gradient in gradients if gradient is not None]
    is_plain = direct and are_plain((loss,))
    left = iter(_products(there, loss) if is_plain else [_product(gradient, loss) for gradient in there])
    gradients = [gradient if gradient is None else next(left) for gradient in gradients]
    learned = [gradient if gradient is None else gradient * loss for gradient in (d_scale, d_temperature)]
    return [*gradients, *learned]


def perform(prepared: Prepared) -> Outputs:
    """Runs a prepared call and returns its outputs, by the names of results()."""
    call, a, learned, direct, _ = prepared
    if not call.trains:
        return _first_pass(prepared, learned)[2]
    apply = _apply if direct else Head.apply
    return dict(zip(call.outputs, apply(a.hidden, a.weight, a.bias, *learned, prepared)))
