"""Calls keep state by the layouts of their tensors and the options. It serves no other call, and is bounded."""

import logitless
import numpy as np
import pytest
import torch
from logitless import call as calls
from logitless import native, outputs
from logitless import run as runs
from logitless.native import Cache
from support import Recorder, assert_same, head, in_threads, lce, results


def variants():
    """Returns calls that each differ from the first in one thing."""
    input, weight, bias, target = head(tokens=12, vocab=16, hidden=8)
    frozen = input.detach(), weight.detach()

    def made(change, *tensors):
        return [change(t.detach()).requires_grad_() for t in tensors]

    plain = dict(hidden=input, weight=weight, targets=target)
    changes = {
        "plain": {},
        "row stride": {"hidden": made(lambda t: torch.cat([t, 2 * t], 1)[:, :8], input)[0]},
        "transposed": {"weight": made(lambda t: (2 * t).t().contiguous().t(), weight)[0]},
        "backwards": {"hidden": made(lambda t: t.flip(0).repeat_interleave(2, 0)[::2], input)[0]},
        "bfloat16": dict(zip(("hidden", "weight"), made(torch.Tensor.bfloat16, input, weight))),
        "bfloat16 weight": {"weight": made(torch.Tensor.bfloat16, weight)[0]},
        "float16": dict(zip(("hidden", "weight"), made(torch.Tensor.half, input, weight))),
        "float64": dict(zip(("hidden", "weight"), made(torch.Tensor.double, input, weight))),
        "frozen input": {"hidden": frozen[0]},
        "frozen weight": {"weight": frozen[1]},
        "frozen": dict(zip(("hidden", "weight"), frozen)),
        "fewer rows": {"hidden": made(lambda t: t[:7], input)[0], "targets": target[:7]},
        "less vocabulary": {"weight": made(lambda t: t[:15], weight)[0], "targets": target.clamp(max=14)},
        "three dimensions": {"hidden": made(lambda t: t.view(3, 4, 8), input)[0], "targets": target.view(3, 4)},
        "int32": {"targets": target.int()},
        "strided target": {"targets": target.repeat_interleave(2)[::2]},
        "bias": {"bias": bias},
        "frozen bias": {"bias": bias.detach()},
        "bfloat16 bias": {"bias": bias.detach().bfloat16().requires_grad_()},
        "class weight": {"class_weight": torch.linspace(0.5, 2, 16)},
        "token weight": {"token_weight": torch.linspace(0.5, 2, 12)},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "ignore_index": {"ignore_index": int(target[1]), "targets": target.clamp(min=0)},
        "smoothing": {"label_smoothing": 0.25},
        "scale": {"scale": 0.5},
        "scale tensor": {"scale": torch.tensor(0.75)},
        "same scale": {"scale": torch.tensor(0.625)},
        "learned scale": {"scale": torch.tensor(0.625, requires_grad=True)},
        "softcap": {"softcap": 2},
        "z_loss": {"z_loss": 0.5},
        "num_items": {"num_items": 5},
        "num_items of 0": {"num_items": 0},
        "num_items tensor": {"num_items": torch.tensor(7)},
        "shift": {"shift": 1},
        "budget": {"max_workspace_bytes": 1 << 20},
        "stats": {"return_stats": True},
        "some stats": {"return_stats": ["argmax", "lse"]},
        "detached stats": {"return_stats": True, "differentiable_stats": False},
        "sparsified": {"gradient": "sparsified", "seed": 1, "threshold": 0.25},
        "sparsified none": {"gradient": "sparsified", "seed": 2, "threshold": 0.25, "reduction": "none"},
        "other seed": {"gradient": "sparsified", "seed": torch.tensor(3), "threshold": 0.25},
        "other threshold": {"gradient": "sparsified", "seed": 1, "threshold": 0.5},
        "draw stats": {
            "gradient": "sparsified", "seed": 1, "threshold": 0.25, "return_stats": ["kept_count", "draw_variance"]
        },
        "main_grad": {"main_grad": torch.zeros(16, 8)},
        "main_grad rows": {"main_grad": torch.zeros(16, 9)[:, :8]},
    }  # fmt: skip
    return {name: plain | change for name, change in changes.items()}


def everything(call):
    """Returns all results of a call."""
    main_grad = call.get("main_grad")
    if main_grad is not None:
        main_grad.zero_()
    names = ("hidden", "weight", "bias", "scale")
    leaves = [call[n] for n in names if torch.is_tensor(call.get(n)) and call[n].requires_grad]
    out = lce(**call)
    parts = list(out) if isinstance(out, tuple) else [out]
    total = sum(part.sum() for part in parts if part is not None and part.requires_grad)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if leaves else ()
    return [p.detach() if torch.is_tensor(p) else p for p in (*parts, *gradients, main_grad)]


def clear():
    calls._calls, runs._runs, outputs._known = Cache(256), Cache(256), Cache(256)


def equal(a, b):
    if a is None or b is None:
        return a is b
    same = torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
    return same and a.dtype == b.dtype and a.shape == b.shape


def test_what_is_kept_answers_for_nothing_else():
    """Every call after every other one gives the same as alone, and as the operators."""
    torch.set_num_threads(1)
    calls = variants()
    alone = {}
    for name, call in calls.items():
        clear()
        alone[name] = [None if t is None else t.clone() for t in everything(call)]
        with Recorder():
            traced = everything(call)
        assert all(map(equal, traced, alone[name])), name
    for order in ((0, 1, 2), (2, 0, 1)):
        clear()
        names = [name for part in order for name in list(calls)[part::3]]
        for name in (*names, *reversed(names)):
            assert all(map(equal, everything(calls[name]), alone[name])), name


def test_calls_without_gradients():
    torch.set_num_threads(1)
    calls = variants()

    def all_of(call):
        out = lce(**call)
        return out if isinstance(out, tuple) else (out,)

    with torch.no_grad():
        alone = {}
        for name, call in calls.items():
            clear()
            alone[name] = all_of(call)
            assert not any(torch.is_tensor(part) and part.requires_grad for part in alone[name])
        clear()
        for name in (*calls, *reversed(calls), *calls):
            assert all(map(equal, all_of(calls[name]), alone[name])), name
        assert len(outputs._known) > 20
    assert lce(**calls["none"]).requires_grad


@pytest.mark.parametrize(
    "of",
    [
        lambda input, weight: logitless.linear_cross_entropy(input, weight, torch.arange(5), reduction="none"),
        lambda input, weight: logitless.linear_top_k(input, weight, 3).log_probs,
        lambda input, weight: logitless.sample(input, weight, seed=0, return_logprobs=True).log_probs,
    ],
    ids=["loss", "top_k", "sample"],
)
def test_calls_without_gradients_under_autocast(of):
    input, weight = torch.randn(5, 64), torch.randn(300, 64)
    expected, short = of(input, weight), of(input.bfloat16(), weight.bfloat16())
    for _ in range(2):
        assert torch.equal(of(input, weight), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(of(input, weight), short)
            assert torch.equal(of(input.bfloat16(), weight.bfloat16()), short)
        with torch.inference_mode():
            assert of(input, weight).is_inference()


def test_threads_and_autocast_are_part_of_the_key(monkeypatch):
    input, weight, _, target = head(tokens=70, vocab=200, hidden=32)
    expected = results(input, weight, target)
    short = results(*(t.detach().bfloat16().requires_grad_() for t in (input, weight)), target)
    clear()
    used, original = [], native.run
    monkeypatch.setattr(native, "run", lambda plan, *rest: used.append(plan) or original(plan, *rest))
    for threads in (1, 3, 1):
        torch.set_num_threads(threads)
        assert_same(results(input, weight, target), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = results(input, weight, target)
            assert_same([a.to(b.dtype) for a, b in zip(got, short)], short)
    assert used[:2] == used[4:] and not set(used[:2]) & set(used[2:4])


def test_the_cache_is_bounded_and_keeps_what_is_used():
    cache = Cache(4)
    for number in range(100):
        cache.put(number, str(number))
        cache.get(0) or cache.put(0, "0")
        assert len(cache) <= 8
    assert cache.get(0) == "0" and cache.get(99) == "99" and cache.get(50) is None
    torch.set_num_threads(1)
    input, weight, _, target = head(tokens=600)
    for tokens in range(1, 600):
        lce(input[:tokens], weight, target[:tokens])
    assert len(calls._calls) <= 512 and len(runs._runs) <= 512


def test_many_threads_with_many_layouts():
    input, weight, _, target = head(tokens=64)
    lengths = list(range(1, 65)) * 3
    expected = {n: results(input[:n].detach().requires_grad_(), weight, target[:n]) for n in lengths}
    clear()
    wrong = []

    def work(order):
        for n in order:
            for f, e in zip(results(input[:n].detach().requires_grad_(), weight, target[:n]), expected[n]):
                if not torch.equal(f.nan_to_num(), e.nan_to_num()):
                    wrong.append(n)

    orders = [np.random.default_rng(seed).permutation(lengths).tolist() for seed in range(4)]
    in_threads(work, *orders)
    assert not wrong


def test_names_of_statistics_from_a_generator():
    out = logitless.linear_cross_entropy(
        torch.randn(4, 8), torch.randn(9, 8), torch.arange(4), return_stats=(name for name in ["nll"])
    )
    assert out.nll.shape == (4,)
