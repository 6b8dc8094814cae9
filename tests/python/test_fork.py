"""A forked process computes without the threads of its parent.

PyTorch's own operations may wait for these threads forever, unless they run on one thread. Tensors here are too small
for more.
"""

import os

import pytest
from support import python

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"), pytest.mark.slow]

# wait() ends a child that hangs; the parent's own code runs before it.
CHILD = """
import os, signal, sys, time
def in_child(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            check()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"status {status} of the child"
"""

TORCH = """
import torch, logitless
torch.set_num_threads(4)
input = torch.randn(300, 32, requires_grad=True)
weight = torch.randn(700, 32, requires_grad=True)
target = torch.randint(0, 700, (300,))
def compute(**options):
    loss = logitless.linear_cross_entropy(input, weight, target, **options).sum()
    return [loss.detach(), *torch.autograd.grad(loss, (input, weight))]
"""

NUMPY = """
import numpy as np, logitless
rng = np.random.default_rng(0)
input = rng.standard_normal((300, 32)).astype("f")
weight = rng.standard_normal((700, 32)).astype("f")
target = rng.integers(0, 700, 300)
def compute(**options):
    result = logitless.numpy.linear_cross_entropy(input, weight, target, gradients=True, threads=4, **options)
    return [result.loss, result.d_hidden, result.d_weight]
"""

SAME = """
def same(a, b):
    assert all(bool((x == y).all()) for x, y in zip(a, b, strict=True))
"""

OPTIONS = ["{}", "{'reduction': 'none'}", "{'gradient': 'sparsified', 'seed': 3, 'threshold': 0.01}"]


@pytest.mark.parametrize("interface", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_the_same_bits_after_the_parent_has_computed(interface):
    code = f"""
for options in ({", ".join(OPTIONS)}):
    expected = compute(**options)
    in_child(lambda: same(compute(**options), expected))
    in_child(lambda: in_child(lambda: same(compute(**options), expected)))  # a grandchild
    same(compute(**options), expected)
"""
    python(CHILD + SAME + interface + code)


def test_after_somebody_else_has_used_the_threads():
    """PyTorch shares its OpenMP with the library: a child may wait for its threads."""
    code = """
(torch.randn(2000, 2000) @ torch.randn(2000, 2000)).exp().sum()
(torch.randn(4000000) + 1).exp()
def check():  # the first call of all
    alone = compute()
    assert alone[0].isfinite()
in_child(check)
"""
    python(CHILD + SAME + TORCH + code)


def test_processes_of_multiprocessing():
    code = """
import multiprocessing
expected = compute()
def work(seed):
    return [bool((a == b).all()) for a, b in zip(compute(), expected)]
with multiprocessing.get_context("fork").Pool(2) as pool:
    for results in pool.map_async(work, range(4)).get(timeout=120):
        assert all(results) and len(results) == 3
"""
    python(NUMPY + code)
