"""headroom.distributed on gloo: 2, 3 and 4 processes against the single-process head, and what they refuse."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from groups import ranks as processes  # noqa: E402

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def errors_of(tmp_path_factory):
    found = {}

    def errors(size):
        if size not in found:
            found[size] = processes.run(size, tmp_path_factory.mktemp("groups"))
        return found[size]

    return errors


@pytest.mark.parametrize("size, case", [(size, case) for size in (2, 3, 4) for case in processes.cases_of(size)])
def test_ranks(errors_of, size, case):
    errors = errors_of(size)[case]
    assert len(errors) == size, f"ranks {sorted(set(range(size)) - set(errors))} did not come to an end"
    for rank in range(size):
        assert not errors[rank], f"rank {rank}:\n{errors[rank]}"
