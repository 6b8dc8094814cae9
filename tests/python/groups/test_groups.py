"""logitless.distributed: 2, 3 and 4 processes against the single-process head, and their errors."""

import pytest

from groups.ranks import cases_of, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size, case", [(size, case) for size in (2, 3, 4) for case in cases_of(size)])
def test_ranks(ranks_of, size, case):
    ranks_of(size)(run, case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size, case", [(size, case) for size in (2, 3) for case in cases_of(size, "cuda")])
def test_ranks_on_cuda(ranks_of, size, case):
    ranks_of(size, "cuda")(run, case, "cuda")
