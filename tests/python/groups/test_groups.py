"""logitless.distributed: 2, 3 and 4 processes against the single-process head, and what they refuse."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from groups import ranks as processes  # noqa: E402

pytestmark = [pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"), pytest.mark.slow]


@pytest.fixture(scope="module")
def errors_of(tmp_path_factory):
    found = {}

    def errors(kind, size):
        if (kind, size) not in found:
            found[kind, size] = processes.run(size, tmp_path_factory.mktemp("groups"), kind)
        return found[kind, size]

    return errors


def check(errors, size):
    assert len(errors) == size, f"ranks {sorted(set(range(size)) - set(errors))} did not come to an end"
    for rank in range(size):
        assert not errors[rank], f"rank {rank}:\n{errors[rank]}"


@pytest.mark.parametrize("size, case", [(size, case) for size in (2, 3, 4) for case in processes.cases_of(size)])
def test_ranks(errors_of, size, case):
    check(errors_of("cpu", size)[case], size)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("size, case", [(size, case) for size in (2, 3) for case in processes.cases_of(size, "cuda")])
def test_ranks_on_cuda(errors_of, size, case):
    check(errors_of("cuda", size)[case], size)
