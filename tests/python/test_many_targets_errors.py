"""What several targets a row and headroom.linear_log_probs refuse, for torch and numpy."""

import headroom
import headroom.numpy
import pytest
import torch

VOCAB, DIM = 37, 8
TWO = torch.zeros(4, 2, dtype=torch.int64)
ONE = torch.zeros(4, dtype=torch.int64)
RANGE = "expected 0 <= target < 37 or ignore_index -100, got"
OUT_OF_RANGE = torch.tensor([[0, 1], [2, -100], [3, 37], [4, 5]])
NEEDS_GRAD = torch.ones(4, 2).requires_grad_()
BAD_LOSSES = [
    (TypeError, "probabilities of the whole vocabulary are not taken", {"target": torch.rand(4, VOCAB)}),
    (TypeError, "target: expected int64 or int32", {"target": torch.rand(4)}),
    (ValueError, "target: expected at most 64 targets", {"target": torch.zeros(4, 65, dtype=torch.int64)}),
    (ValueError, "target: expected at most 64 targets", {"target": TWO[:, :0]}),
    (ValueError, r"target: expected shape \[4\]", {"target": TWO[:3]}),
    (ValueError, r"target_weight: expected shape \[4, 2\]", {"target_weight": torch.ones(4, 3)}),
    (ValueError, "target_weight: expected a tensor that does not require grad", {"target_weight": NEEDS_GRAD}),
    (TypeError, "target_weight: expected a torch.Tensor", {"target_weight": [1.0]}),
    (ValueError, "target_weight: expected None with one", {"target": ONE, "target_weight": torch.ones(4)}),
    (ValueError, "weight: expected None with several targets", {"weight": torch.ones(VOCAB)}),
    (ValueError, 'gradient: expected "exact" with several targets', {"gradient": "thinned"}),
    (ValueError, rf"target: {RANGE} 37 at target\[2, 1\]", {"target": OUT_OF_RANGE}),
    (ValueError, rf"target: {RANGE} -1 at target\[0, 0\]", {"target": torch.full((4, 2), -1)}),
]  # fmt: skip


@pytest.mark.parametrize("error,message,changed", BAD_LOSSES, ids=[str(i) for i in range(len(BAD_LOSSES))])
def test_losses_that_are_refused(error, message, changed):
    arguments = {"input": torch.randn(4, DIM), "linear_weight": torch.randn(VOCAB, DIM)}
    arguments["target"] = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(error, match=message):
        headroom.linear_cross_entropy(**arguments | changed)
    if "a torch.Tensor" not in message and "require grad" not in message:
        with pytest.raises(error, match=message):
            headroom.numpy.linear_cross_entropy(
                **{name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in (arguments | changed).items()}
            )


BAD_IDS = [
    (ValueError, r"ids: expected shape \[4, K\]", ONE),
    (ValueError, r"ids: expected shape \[4\]", torch.zeros(5, 2, dtype=torch.int64)),
    (ValueError, "ids: expected at most 64", torch.zeros(4, 65, dtype=torch.int64)),
    (TypeError, "ids: expected int64 or int32", torch.zeros(4, 2)),
    (ValueError, rf"ids: {RANGE} 40 at ids\[3, 0\]", torch.tensor([[0, 1], [0, 1], [2, 3], [40, 1]])),
]  # fmt: skip


@pytest.mark.parametrize("error,message,ids", BAD_IDS, ids=[str(i) for i in range(len(BAD_IDS))])
def test_ids_that_are_refused(error, message, ids):
    input, weight = torch.randn(4, DIM), torch.randn(VOCAB, DIM)
    with pytest.raises(error, match=message):
        headroom.linear_log_probs(input, weight, ids)
    with pytest.raises(error, match=message):
        headroom.numpy.linear_log_probs(input.numpy(), weight.numpy(), ids.numpy())
