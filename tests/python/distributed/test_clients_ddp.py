"""DistributedDataParallel: nothing is done for it, and all ways to the loss have the gradients of one process."""

import contextlib

import pytest
import torch
from client_models import Model, alone, train
from client_oracle import excess

pytestmark = pytest.mark.slow


def steps(mesh, head, reduction, tied, micro):
    found = []
    for made in ("stock", head):
        model = Model(made, reduction, tied, bias=True)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        quiet = lambda last: contextlib.nullcontext() if last else wrapped.no_sync()  # noqa: B023, E731
        found.append(train(wrapped, model, mesh.get_rank(), micro=micro, sync=quiet))
    return found


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(
    ("head", "reduction", "tied"),
    [
        ("inside", "mean", False),
        ("inside", "none", False),
        ("inside", "mean", True),
        ("module", "mean", False),
        ("module", "none", False),
    ],
)
def test_gradients_and_their_accumulation(two, head, reduction, tied, micro):
    """With no_sync but for the last part; the second step finds what the first has left."""
    true = alone(2, micro=micro, reduction=reduction, tied=tied, bias=True)
    for stock, fused in two(steps, head, reduction, tied, micro):
        torch.testing.assert_close(fused[0], stock[0])
        assert fused[1].keys() == true.keys()
        for name, gradient in true.items():
            assert excess(fused[1][name], stock[1][name], gradient) <= 1, name
