"""tests/peers/run.py, on a made-up checkout."""

from pathlib import Path

import pytest
from support import process

pytestmark = pytest.mark.slow
RUN = Path(__file__).resolve().parents[2] / "peers" / "run.py"

REFERENCE = """
import kernels_that_need_a_gpu

def linear_cross_entropy_func_ref(x, weight, bias: Optional[Tensor], target):
    return F.cross_entropy(F.linear(x, weight, bias), target)
"""

TESTS = """
import torch
from quack.linear_cross_entropy import chunked_linear_cross_entropy, linear_cross_entropy_func_ref

def test_loss():
    torch.cuda.manual_seed(0)
    x, weight = (torch.randn(size, 8, device="cuda", requires_grad=True) for size in (5, 16))
    target = torch.arange(5).cuda()
    assert x.device.type == "cpu" and chunked_linear_cross_entropy.__module__ == "logitless.compat.quack"
    expected = linear_cross_entropy_func_ref(x, weight, None, target)
    torch.testing.assert_close(chunked_linear_cross_entropy(x, weight, target), expected)

def test_that_fails():
    with torch.device("cuda"), torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.ones(3).device.type == "cuda"
"""


def run(library, repository):
    return process(str(RUN), library, "--repository", str(repository))


def test_a_checkout(tmp_path):
    for name, text in (("quack/linear_cross_entropy.py", REFERENCE), ("tests/test_linear_cross_entropy.py", TESTS)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    done = run("quack", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_not_a_checkout(tmp_path):
    done = run("fla", tmp_path)
    assert done.returncode == 2
    assert "--repository: expected a checkout of fla's repository" in done.stderr
