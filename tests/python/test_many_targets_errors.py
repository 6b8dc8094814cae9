"""What several targets a row and logitless.linear_log_probs refuse, for torch and numpy."""

import logitless
import logitless.numpy
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
    (TypeError, "target: expected int64 or int32", {"target": torch.rand(4), "target_weight": None}),
    (ValueError, "target: expected at most 64 targets", {"target": torch.zeros(4, 65, dtype=torch.int64)}),
    (ValueError, "target: expected at most 64 targets", {"target": TWO[:, :0]}),
    (ValueError, r"target: expected shape \[4\]", {"target": TWO[:3]}),
    (ValueError, "got .*; several targets a row want target_weight", {"target_weight": None}),
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
    arguments = {"input": torch.randn(4, DIM), "linear_weight": torch.randn(VOCAB, DIM), "target": TWO}
    if "target_weight" not in changed:
        arguments["target_weight"] = torch.ones(changed.get("target", TWO).shape)
    with pytest.raises(error, match=message):
        logitless.linear_cross_entropy(**arguments | changed)
    if "a torch.Tensor" not in message and "require grad" not in message:
        with pytest.raises(error, match=message):
            logitless.numpy.linear_cross_entropy(
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
        logitless.linear_log_probs(input, weight, ids)
    with pytest.raises(error, match=message):
        logitless.numpy.linear_log_probs(input.numpy(), weight.numpy(), ids.numpy())


@pytest.mark.parametrize("rows", [(), (4,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 2, VOCAB])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_dimension_too_many_is_a_mistake(rows, count, reduction):
    """Only their weights say that a row has several targets."""
    input, weight = torch.randn(*rows, DIM), torch.randn(VOCAB, DIM)
    target = torch.zeros(*rows, count, dtype=torch.int64)
    criterion = logitless.LinearCrossEntropyLoss(DIM, VOCAB, reduction=reduction)
    calls = {
        "function": lambda: logitless.linear_cross_entropy(input, weight, target, reduction=reduction),
        "compiled": lambda: torch.compile(logitless.linear_cross_entropy, backend="eager")(input, weight, target),
        "module": lambda: criterion(input, target),
        "head": lambda: logitless.nn.FusedHead(DIM, VOCAB, reduction=reduction)(input, target),
        "numpy": lambda: logitless.numpy.linear_cross_entropy(
            input.numpy(), weight.numpy(), target.numpy(), reduction=reduction
        ),
    }
    for name, call in calls.items():
        with pytest.raises(Exception, match=r"(target|labels): expected .*target_weight") as error:
            call()
        assert isinstance(error.value, ValueError) or name == "compiled"
