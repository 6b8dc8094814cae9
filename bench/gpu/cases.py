"""Times and memory of calls of the head and related functions, in sets whose calls take turns.

    python bench/gpu/cases.py options [--shapes 8192x128256x4096] [--rounds 9]
    python bench/gpu/cases.py autocast --budgets unlimited,160 --kernels      with every kernel of a call
    python bench/gpu/cases.py torch --device cpu --dtype float32 --budgets 256,32 --peak
    python bench/gpu/cases.py sparsified --device cpu --data peaked

LOGITLESS_LIBRARY names liblogitless.so. Each round runs all cases of a shape in random order. Times are medians of
calls after a short idle. Ratios are medians of ratios within a round. F is the bare product of input and weight. Memory
is a call's peak beyond inputs and gradients: PyTorch's allocator on a GPU, the resident set on the CPU.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import functools
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd import DeviceType

from clock import Call, Clock
from data import Inputs, make_inputs
from harness import ROOT, Case, has_device, measured, parser
from methods import (
    Loss,
    Method,
    budget_name,
    budget_of,
    our_loss,
    our_loss_of_kept_copies,
    without_recordings,
)
from shapes import Shape, parse_budgets, parse_shapes
from table import markdown
from timing import gemm_cells, pass_call

F = "F"
STATISTICS = ("entropy", "argmax", "target_logit", "mean_logit", "log_sum_sq_probs", "is_top1", "max_logit")
PRODUCT_BYTES = 8 << 30  # bytes of the logits that F computes at a time
WHOLE = 1 << 31  # most similarities of a whole matrix
LONGEST = 60  # most characters of a kernel's name
TRL_COLUMNS = 32768  # columns of TRL's tiles


class Bench:
    """Inputs of one shape, from which sets build their cases."""

    def __init__(self, args: argparse.Namespace, shape: Shape) -> None:
        self.args, self.shape = args, shape
        made = make_inputs(shape, args.data, args.device)
        self.inputs = Inputs(*(part.to(getattr(torch, args.dtype)) for part in made[:2]), made.target)

    def budgets(self) -> Iterator[tuple[str, Any]]:
        return ((budget_name(budget), budget_of(budget)) for budget in self.args.budgets)

    def loss(self, name: str, loss: Loss, *bases: str, inputs: Inputs | None = None) -> Case:
        return Case(name, pass_call(Method(name, loss), inputs or self.inputs, "loss"), bases)

    def both(self, name: str, loss: Loss, *bases: str, inputs: Inputs | None = None) -> Case:
        """Runs forward and backward."""
        inputs = inputs or self.inputs
        return Case(name, pass_call(Method(name, loss), inputs, "gradients"), bases, _bytes(*inputs[:2]))

    def product(self) -> Case:
        columns = max(1, PRODUCT_BYTES // (self.inputs.weight.element_size() * max(1, self.shape.tokens)))
        parts = self.inputs.weight.split(columns)

        def call() -> None:
            for part in parts:
                torch.mm(self.inputs.hidden, part.T)

        return Case(F, call)


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def torch_head(bench: Bench) -> Iterator[Case]:
    """Compares ``F.cross_entropy(F.linear(...))`` with our loss."""

    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight), target)

    yield bench.product()
    yield bench.both("torch", plain, F)
    yield bench.loss("torch, loss", plain, F)
    for name, budget in bench.budgets():
        yield bench.both(f"logitless, {name}", our_loss(max_workspace_bytes=budget), "torch", F)
    yield bench.loss("logitless, loss", our_loss(), "torch, loss", F)


def sparsified(bench: Bench) -> Iterator[Case]:
    """Compares sparsified gradients with exact ones; ``run.py --data`` measures their errors."""
    yield bench.both("exact", our_loss(), "exact")
    yield bench.loss("loss alone", our_loss(), "exact")
    for exponent in (9, 10):
        loss = our_loss(gradient="always-sparsified", threshold=2.0**-exponent, seed=0)
        yield bench.both(f"sparsified 2^-{exponent}", loss, "exact", "loss alone")


def screen(bench: Bench) -> Iterator[Case]:
    """Times sparsified gradients behind a screen, whose copy of the weight each call makes, or the first one."""
    yield bench.product()
    yield bench.both("exact", our_loss(), F)
    for exponent in (8, 9):
        given: dict[str, Any] = {"gradient": "always-sparsified", "threshold": 2.0**-exponent, "seed": 0}
        yield bench.both(f"sparsified 2^-{exponent}", our_loss(**given), F, "exact")
        made = f"screen, 2^-{exponent}"
        yield bench.both(made, our_loss(screen="fp8", **given), F)
        yield bench.both(f"{made}, kept copy", our_loss_of_kept_copies(**given), F, made)
        yield bench.loss(f"{made}, loss", our_loss(screen="fp8", **given), F)
        yield bench.loss(f"{made}, loss, kept copy", our_loss_of_kept_copies(**given), F, f"{made}, loss")


def options(bench: Bench) -> Iterator[Case]:
    """Times row statistics, top-k, row temperatures and batch_invariant."""
    import logitless

    hidden, weight, target = bench.inputs
    given: dict[str, dict[str, Any]] = {name: {"return_stats": (name,)} for name in STATISTICS}
    given["all statistics"] = {"return_stats": STATISTICS}
    given["temperature of rows"] = {"temperature": torch.full(target.shape, 0.8, device=hidden.device)}
    given["batch_invariant"] = {"batch_invariant": True}
    yield bench.product()
    yield bench.loss("plain", our_loss(), F)
    for name, of_name in given.items():
        yield bench.loss(name, our_loss(**of_name), "plain", F)
    for k in (1, 8, 64):
        yield Case(f"linear_top_k, {k}", functools.partial(logitless.linear_top_k, hidden, weight, k), ("plain", F))
    yield bench.both("plain, gradients", our_loss(), F)
    yield bench.both("batch_invariant, gradients", our_loss(batch_invariant=True), "plain, gradients", F)


def _products(name: str, inputs: Inputs) -> list[Case]:
    """Returns the three bare products, and the product of the logits alone."""
    cells = gemm_cells(inputs)

    def all_three() -> None:
        for cell in cells:
            cell.call()

    return [Case(name, all_three), Case(f"{name}, one", cells[0].call)]


def mixed(bench: Bench) -> Iterator[Case]:
    """Times float32 hidden states with a bf16 weight, float32 alone, and TF32."""
    wide = Inputs(bench.inputs.hidden.float(), bench.inputs.weight.float(), bench.inputs.target)
    bases = "products in float32", "products in float32, one"

    def with_tf32(case: Case) -> Case:
        def allowed() -> None:
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                case.call()
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False

        return dataclasses.replace(case, name=f"{case.name}, TF32", call=allowed)

    yield from _products(bases[0], wide)
    half = Inputs(wide.hidden, bench.inputs.weight.bfloat16(), wide.target)
    for name, inputs in (("float32 hidden, bf16 weight", half), ("float32", wide)):
        cases = [
            bench.both(name, our_loss(), bases[0], inputs=inputs),
            bench.loss(f"{name}, loss", our_loss(), bases[1], inputs=inputs),
        ]
        yield from cases
        if inputs is wide:
            yield from map(with_tf32, cases)


def autocast(bench: Bench) -> Iterator[Case]:
    """Compares float32 weights under autocast to bf16 with bf16 weights."""
    wide = Inputs(bench.inputs.hidden.float(), bench.inputs.weight.float(), bench.inputs.target)
    device = bench.inputs.hidden.device.type

    def under(loss: Loss) -> Loss:
        def cast(*inputs: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return loss(*inputs)

        return cast

    yield from _products("products in bf16", bench.inputs)
    for name, budget in bench.budgets():
        loss = our_loss(max_workspace_bytes=budget)
        yield bench.both(f"bf16, {name}", loss, "products in bf16")
        yield bench.both(f"autocast, {name}", under(loss), "products in bf16", inputs=wide)
    yield bench.loss("bf16, loss", our_loss(), "products in bf16, one")
    yield bench.loss("autocast, loss", under(our_loss()), "products in bf16, one", inputs=wide)


def _with_gradients(name: str, loss: Callable[[], Tensor], upstream: Tensor, leaves: Inputs, *bases: str) -> Case:
    """Returns a call with a loss per token and its upstream gradient, or with a mean."""

    def call() -> None:
        leaves.hidden.grad = leaves.weight.grad = None
        result = loss()
        result.backward(upstream if result.dim() else None)
        leaves.hidden.grad = leaves.weight.grad = None

    return Case(name, call, bases, _bytes(*leaves[:2]))


def _first_of(function: Callable[..., Any], *arguments: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments)[0]


def later(bench: Bench) -> Iterator[Case]:
    """Times gradients that come after the loss, for each token, and options of the loss, beside the three matmuls."""
    import logitless

    leaves, device = bench.inputs.leaves(), bench.args.device
    hidden, weight, target = leaves
    tokens, vocab = bench.shape.tokens, bench.shape.vocab
    upstream, upstream_entropy = (torch.randn(tokens, device=device) for _ in range(2))
    ids, upstream_ids = torch.randint(vocab, (tokens, 8), device=device), torch.randn(tokens, 8, device=device)
    bias = torch.randn(vocab, device=device, dtype=weight.dtype).requires_grad_()
    half = Inputs(*(part.detach().half().requires_grad_() for part in leaves[:2]), target)

    def token_losses(**options: Any) -> Callable[[], None]:
        return lambda: logitless.linear_cross_entropy(hidden, weight, target, reduction="none", **options).backward(
            upstream
        )

    def with_entropy(**options: Any) -> Callable[[], None]:
        def call() -> None:
            options_of_call = {"reduction": "none", "return_stats": ("entropy",), **options}
            out = logitless.linear_cross_entropy(hidden, weight, target, **options_of_call)
            torch.autograd.backward([out.loss, out.entropy], [upstream, upstream_entropy])

        return call

    def mean(**options: Any) -> Callable[[], None]:
        return lambda: logitless.linear_cross_entropy(hidden, weight, target, **options).backward()

    def log_probs(ids: Tensor, upstream: Tensor) -> Callable[[], None]:
        return lambda: logitless.linear_log_probs(hidden, weight, ids).backward(upstream)

    def scaled_half(budget: int | str | None) -> Callable[[], None]:
        return lambda: (logitless.linear_cross_entropy(*half, max_workspace_bytes=budget) * 1024).backward()

    def with_grads(name: str, call: Callable[[], None]) -> Case:
        def fresh() -> None:
            call()
            for leaf in (hidden, weight, bias, *half[:2]):
                leaf.grad = None

        return Case(name, fresh, ("three matmuls",), _bytes(*leaves[:2]))

    yield from _products("three matmuls", bench.inputs)
    for name, budget in bench.budgets():
        yield with_grads(f"mean, {name}", mean(max_workspace_bytes=budget))
        yield with_grads(f"reduction none, {name}", token_losses(max_workspace_bytes=budget))
        yield with_grads(f"loss and entropy, {name}", with_entropy(max_workspace_bytes=budget))
    yield with_grads("reduction none, recompute_logits", token_losses(recompute_logits=True))
    yield with_grads("linear_log_probs, K = 1", log_probs(target[:, None], upstream[:, None]))
    yield with_grads("linear_log_probs, K = 8", log_probs(ids, upstream_ids))
    yield with_grads("reduction none, label_smoothing", token_losses(label_smoothing=0.1))
    class_weight = torch.rand(vocab, device=device)
    given = {"label_smoothing": 0.1, "class_weight": class_weight, "z_loss": 1e-4, "bias": bias, "softcap": 30.0}
    for name, value in given.items():
        for named, budget in bench.budgets():
            yield with_grads(f"mean, {name}, {named}", mean(**{name: value}, max_workspace_bytes=budget))
    for name, budget in bench.budgets():
        yield with_grads(f"float16, scaled, {name}", scaled_half(budget))


def candidates(bench: Bench) -> Iterator[Case]:
    """Times log-probabilities over lists of ids, uniform and by Zipf's law, beside whole logits."""
    import logitless

    leaves, device = bench.inputs.leaves(), bench.args.device
    hidden, weight = leaves[:2]
    tokens, vocab = bench.shape.tokens, bench.shape.vocab
    odds = 1 / torch.arange(1, vocab + 1, device=device)
    places = torch.randperm(vocab, device=device)
    yield from _products("three matmuls", bench.inputs)
    for count in (64, 512, 2048):
        uniform = torch.randint(vocab, (tokens, count), device=device)
        zipf = places[
            torch.searchsorted((odds / odds.sum()).cumsum(0), torch.rand(tokens, count, device=device)).clamp_(
                max=vocab - 1
            )
        ]
        upstream = torch.randn(tokens, count, device=device)
        for name, ids in (("uniform", uniform), ("Zipf", zipf)):

            def whole(ids: Tensor = ids) -> Tensor:
                return functional.linear(hidden, weight).gather(1, ids).float().log_softmax(-1)

            def lists(ids: Tensor = ids) -> Tensor:
                return logitless.linear_candidates(hidden, weight, ids).log_probs

            for kind, call in (("whole logits", whole), ("linear_candidates", lists)):
                yield _with_gradients(f"{kind}, {count} {name} ids", call, upstream, leaves, "three matmuls")


def pairs(bench: Bench) -> Iterator[Case]:
    """Times the loss of pairs and its gradients in one direction and both, beside the whole matrix where it fits."""
    import logitless

    leaves, tokens = bench.inputs.leaves(), bench.shape.tokens
    order, bare = torch.arange(tokens, device=bench.args.device), "three matmuls"

    def whole(symmetric: bool) -> Tensor:
        z = functional.linear(leaves.hidden, leaves.weight).float()
        loss = functional.cross_entropy(z, order)
        return (loss + functional.cross_entropy(z[:, :tokens].T, order)) / 2 if symmetric else loss

    yield from _products(bare, bench.inputs)
    for symmetric, way in ((False, "one direction"), (True, "both")):
        for name, budget in bench.budgets():
            given = {"symmetric": symmetric, "max_workspace_bytes": budget}
            call = functools.partial(logitless.info_nce, *leaves[:2], **given)
            yield _with_gradients(f"logitless, {way}, {name}", call, order, leaves, bare)
        if tokens * bench.shape.vocab <= WHOLE:
            call = functools.partial(whole, symmetric)
            yield _with_gradients(f"whole similarities, {way}", call, order, leaves, bare)


def heads(bench: Bench) -> Iterator[Case]:
    """Times four heads on shared hidden states with their gradients, with a weight each and with one for all."""
    import logitless

    leaves = bench.inputs.leaves()
    own = [leaves.weight, *(leaves.weight.detach().clone().requires_grad_() for _ in range(3))]
    targets = torch.stack([leaves.target.roll(head) for head in range(4)])

    def clearing(call: Callable[[], Tensor]) -> Callable[[], None]:
        def cleared() -> None:
            call().backward()
            for leaf in (leaves.hidden, *own):
                leaf.grad = None

        return cleared

    for way, weights in (("a weight each", own), ("one weight", own[:1] * 4)):
        for name, budget in bench.budgets():
            options: dict[str, Any] = {"max_workspace_bytes": budget}
            separate = f"separate calls, {way}, {name}"

            def one_by_one(weights: list[Tensor] = weights, options: dict[str, Any] = options) -> Tensor:
                calls = zip(weights, targets, strict=True)
                losses = [logitless.linear_cross_entropy(leaves.hidden, *of_head, **options) for of_head in calls]
                return torch.stack(losses).sum()

            given = weights if weights is own else leaves.weight
            together = functools.partial(
                logitless.multi_head_linear_cross_entropy, leaves.hidden, given, targets, **options
            )
            yield Case(separate, clearing(one_by_one), (), _bytes(leaves.hidden, *set(weights)))
            yield Case(
                f"together, {way}, {name}", clearing(together), (separate,), _bytes(leaves.hidden, *set(weights))
            )


def trl(bench: Bench) -> Iterator[Case]:
    """Times TRL's log-probabilities and entropies as GRPO calls them, without gradients of entropies.

    One case is TRL's own function, the other is the one of logitless.trl.patch().
    """
    import logitless.trl
    import trl.trainer.utils

    logitless.trl.patch(max_workspace_bytes=budget_of(bench.args.budgets[0]))
    function, leaves = trl.trainer.utils._ChunkedLogProbFunction, bench.inputs.leaves()
    upstream = torch.randn(bench.shape.tokens, device=leaves.hidden.device) / bench.shape.tokens
    more = (None, leaves.target, 1.0, TRL_COLUMNS, None, 1.0, ("log_probs", "entropy"))
    yield bench.product()
    for name, apply, bases in (("TRL", function.original.apply, (F,)), ("logitless", function.apply, ("TRL", F))):
        call = _first_of(apply, leaves.hidden, leaves.weight, *more)
        yield _with_gradients(name, call, upstream, leaves, *bases)


def divergence(bench: Bench) -> Iterator[Case]:
    """Times the Jensen-Shannon divergence to a teacher's head twice as wide: ours, TRL's, and whole logits."""
    import logitless

    leaves, beta = bench.inputs.leaves(), 0.5
    tokens, vocab, width = bench.shape[1:]
    place = {"device": bench.args.device, "dtype": leaves.hidden.dtype}
    teacher = torch.randn(tokens, 2 * width, **place)
    teacher_weight = torch.empty(vocab, 2 * width, **place).normal_(0, (2 * width) ** -0.5)
    heads = (leaves.hidden, leaves.weight, teacher, teacher_weight)
    upstream = torch.randn(tokens, device=bench.args.device) / tokens

    def whole() -> Tensor:
        log_p, log_q = ((h @ w.T).float().log_softmax(-1) for h, w in (heads[:2], heads[2:]))
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        return (beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)).sum(-1)

    def products() -> None:
        """Runs the plan's products: four of the student and two of the teacher, 512 rows at a time."""
        out = torch.empty(512, vocab, **place)
        for rows, of_teacher in zip(bench.inputs.hidden.split(512), teacher.split(512)):
            dz = out[: len(rows)]
            for _ in range(2):
                torch.mm(rows, bench.inputs.weight.T, out=dz)
                torch.mm(of_teacher, teacher_weight.T, out=dz)
            dz @ bench.inputs.weight
        for columns in bench.inputs.weight.split(8192):
            torch.empty(tokens, len(columns), **place).fill_(0.5).T @ bench.inputs.hidden

    bare = "bare products, 4 + 2"
    yield Case(bare, products)
    for name, reduction in (("logitless, a gradient a token", "none"), ("logitless, a mean", "mean")):
        given = {"beta": beta, "reduction": reduction, "max_workspace_bytes": budget_of(bench.args.budgets[0])}
        call = functools.partial(logitless.linear_divergence, *heads, **given)
        yield _with_gradients(name, call, upstream, leaves, bare)
    yield _with_gradients("whole logits", whole, upstream, leaves, bare)
    try:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Trl
    except ImportError:
        print("TRL's function is not installed")
    else:
        call = _first_of(Trl.apply, *heads[:2], None, *heads[2:], None, beta)
        yield _with_gradients("TRL", call, upstream, leaves, bare)


@dataclasses.dataclass(frozen=True)
class Set:
    cases: Callable[[Bench], Iterator[Case]]
    shapes: str
    budgets: str = "unlimited"


SETS = {
    "torch": Set(torch_head, "2048x32768x256,1024x131072x1024,512x256000x2304", "256,32"),
    "sparsified": Set(sparsified, "1024x131072x1024"),
    "screen": Set(screen, "8192x131072x2048,2048x131072x2048,512x131072x2048,8192x256000x2304"),
    "options": Set(options, "8192x128256x4096,8192x256000x2304,1024x128256x4096"),
    "mixed": Set(mixed, "4096x128256x2048"),
    "autocast": Set(autocast, "8192x128256x4096", "unlimited,2560,1280,160"),
    "later": Set(later, "8192x128256x4096,8192x151936x4096,8192x256000x2304", "unlimited,1024,256"),
    "candidates": Set(candidates, "8192x151936x4096", "unlimited"),
    "heads": Set(heads, "8192x131072x2048,2048x128256x4096", "unlimited,256"),
    "pairs": Set(pairs, "32768x32768x512,8192x1000000x128", "unlimited,256"),
    "trl": Set(trl, "8192x151936x4096", "1024"),
    "divergence": Set(divergence, "8192x151936x2048", "1024"),
}


def kernels_of(call: Call, calls: int = 10) -> list[tuple[str, float, float]]:
    """Returns name, launches per call and microseconds per call of each kernel, the longest first.

    PyTorch's profiler (CUPTI) measures them. Recorded runs are off, because kernels of a graph have no names.
    """
    with without_recordings():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.device_time)

    def short(name: str) -> str:
        """Returns a C++ function's name without namespaces and arguments."""
        return re.sub(r"^void |\(anonymous namespace\)::|logitless::cuda::|\(.*$", "", name)[:LONGEST]

    rows = [(short(name), len(each) / calls, sum(each) / calls) for name, each in times.items()]
    return sorted(rows, key=lambda row: -row[2])


def show_kernels(case: Case) -> None:
    rows = kernels_of(case.call)
    print(f"{case.name}: {sum(us for _, _, us in rows):.0f} us of kernels\n")
    table = [[name, f"{launches:g}", f"{us:.1f}"] for name, launches, us in rows]
    print("\n".join(markdown(["kernel", "launches", "us"], table)) + "\n", flush=True)


def show_peaks(flop: float) -> None:
    """Prints the rates of this machine's multiply-add units: fp32 FMA, and the bf16 dot product if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder) / "fma_peak.so"
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
        subprocess.run([*command, str(ROOT / "bench" / "fma_peak.c"), "-o", str(probe)], check=True)
        library = ctypes.CDLL(str(probe))
        for name, peak in (("fp32", library.fp32_peak), ("bf16", library.bf16_peak)):
            peak.restype = ctypes.c_double
            if gflops := peak(torch.get_num_threads()):
                print(f"peak in {name}: {gflops:.0f} GFLOP/s, F in {flop / gflops * 1e-6:.2f} ms", flush=True)


def main() -> int:
    options = parser(__doc__, shapes=None, budgets=None, rounds=5, dtype="bfloat16")
    options.add_argument("set", choices=SETS, help="; ".join(f"{n}: {s.cases.__doc__}" for n, s in SETS.items()))
    options.add_argument("--data", default="std1", help="std1, std3, peaked and so on")
    options.add_argument("--kernels", action="store_true", help="on a GPU: the time of every kernel of each case")
    options.add_argument("--peak", action="store_true", help="on the CPU: its multiply-add peak, before and after")
    args = options.parse_args()
    of_set = SETS[args.set]
    args.budgets = args.budgets or parse_budgets(of_set.budgets)
    if not has_device(args):
        return 2
    clock = Clock(args.device)
    for shape in args.shapes or parse_shapes(of_set.shapes):
        bench = Bench(args, shape)
        cases = list(of_set.cases(bench))
        print(f"### {args.set}, {shape.tokens} x {shape.vocab} x {shape.hidden}, {args.dtype}, {args.data}\n")
        if args.peak:
            show_peaks(shape.flop)
        print("\n".join(measured(clock, cases, args.rounds)) + "\n", flush=True)
        if args.peak:
            show_peaks(shape.flop)
        for case in cases if args.kernels else []:
            show_kernels(case)
        del bench, cases
        clock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
