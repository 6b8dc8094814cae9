"""Bad arguments: TypeError or ValueError naming argument, expected and got."""

import copy
import pickle

import headroom
import pytest
import torch

INPUT, WEIGHT = torch.randn(4, 5), torch.randn(7, 5)
TARGET = torch.tensor([0, 1, 2, 6])


def call(input=INPUT, weight=WEIGHT, target=TARGET, **options):
    return headroom.linear_cross_entropy(input, weight, target, **options)


BAD = [
    ({"input": [[1.0]]}, TypeError, "input: expected a torch.Tensor, got list"),
    ({"input": INPUT.long()}, TypeError, "input: expected float32"),
    ({"input": INPUT.to("meta")}, ValueError, "input: expected a tensor on the CPU or a CUDA device, got device meta"),
    ({"weight": WEIGHT.to_sparse()}, TypeError, "linear_weight: expected a dense tensor"),
    ({"input": INPUT[:, :4]}, ValueError, r"input: expected shape \[..., D\] with D = 5 .* got \[4, 4\]"),
    ({"input": torch.tensor(1.0)}, ValueError, "input: expected shape"),
    ({"weight": WEIGHT[0]}, ValueError, r"linear_weight: expected shape \[V, D\], got \[5\]"),
    ({"weight": torch.randn(0, 5)}, ValueError, "vocab: expected"),
    ({"weight": WEIGHT.double()}, TypeError, "linear_weight: expected float64 for all"),
    ({"target": TARGET.float()}, TypeError, "target: expected int64 or int32 class indices, got torch.float32"),
    ({"target": TARGET[:3]}, ValueError, r"target: expected shape \[4\] .* got \[3\]"),
    ({"linear_bias": torch.zeros(6)}, ValueError, r"linear_bias: expected shape \[7\] \(V\), got \[6\]"),
    ({"linear_bias": torch.zeros(7).double()}, TypeError, "linear_bias: expected float64 for all"),
    ({"weight": WEIGHT, "reduction": "avg"}, ValueError, "reduction: expected one of"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got 1.5"),
    ({"label_smoothing": "a lot"}, TypeError, "label_smoothing: expected a number, got str"),
    ({"scale": float("inf")}, ValueError, "scale: expected a finite number"),
    ({"softcap": -1.0}, ValueError, "softcap: expected a finite number >= 0"),
    ({"z_loss": -1.0}, ValueError, "z_loss: expected"),
    ({"num_items": 0}, ValueError, "num_items: expected a finite number > 0, got 0"),
    ({"num_items": torch.tensor(-3)}, ValueError, "num_items: expected a finite number > 0, got -3"),
    ({"num_items": torch.ones(2)}, ValueError, "num_items: expected one element"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items: expected None unless"),
    ({"num_items": torch.tensor(3), "reduction": "sum"}, ValueError, "num_items: expected None unless"),
    ({"shift": -1}, ValueError, "shift: expected"),
    ({"shift": 1.5}, TypeError, "shift: expected an integer, got float"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an integer"),
    ({"max_workspace_bytes": 0}, ValueError, "max_workspace_bytes: expected a positive"),
    ({"token_weight": torch.ones(3)}, ValueError, r"token_weight: expected shape \[4\]"),
    ({"token_weight": torch.ones(4, requires_grad=True)}, ValueError, "token_weight: expected a tensor that does not"),
    ({"main_grad": torch.zeros(7, 5).half()}, TypeError, "main_grad: expected torch.float32"),
    ({"main_grad": torch.zeros(5, 7).T}, ValueError, "main_grad: expected contiguous rows"),
    ({"main_grad": torch.zeros(6, 5)}, ValueError, r"main_grad: expected shape \[7, 5\]"),
    ({"return_stats": "nll"}, TypeError, "return_stats: expected a bool or a sequence"),
    ({"return_stats": ["nil"]}, ValueError, "return_stats: expected names out of"),
]


@pytest.mark.parametrize("arguments, error, message", BAD, ids=[m[:28] for _, _, m in BAD])
@pytest.mark.parametrize("grad", [True, False])
def test_bad_arguments(arguments, error, message, grad):
    arguments = dict(arguments)
    if grad and "input" not in arguments:
        arguments["input"] = INPUT.clone().requires_grad_()
    with pytest.raises(error, match=message):
        call(**arguments)


def test_class_weight_shape():
    with pytest.raises(ValueError, match=r"weight: expected shape \[7\]"):
        headroom.linear_cross_entropy(INPUT, WEIGHT, TARGET, weight=torch.ones(5))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_dtensor_is_refused():
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        weight = DTensor.from_local(WEIGHT, mesh, [Replicate()])
        with pytest.raises(TypeError, match="linear_weight: expected a plain torch.Tensor, got DTensor"):
            call(weight=weight)
    finally:
        torch.distributed.destroy_process_group()


def test_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(1, 5)], layout=torch.jagged)
    with pytest.raises(TypeError, match="input: expected a dense tensor"):
        call(input=nested)


@pytest.mark.parametrize("later", [False, True])
def test_budget(later):
    input, weight = (torch.randn(n, 8, requires_grad=True) for n in (300, 700))
    target = torch.randint(0, 700, (300,))

    def run(budget):
        reduction = "none" if later else "mean"
        loss = headroom.linear_cross_entropy(input, weight, target, reduction=reduction, max_workspace_bytes=budget)
        loss.sum().backward()

    with pytest.raises(headroom.BudgetTooSmallError, match="max_workspace_bytes: expected at least") as error:
        run(1)
    required = error.value.required_bytes
    assert str(required) in str(error.value)
    with pytest.raises(headroom.BudgetTooSmallError):
        run(required - 1)
    for _ in range(2):  # the backward pass of reduction "none" may need more than the forward pass did
        try:
            run(required)
        except headroom.BudgetTooSmallError as second:
            required = second.required_bytes
    run(required)


def test_errors_pickle():
    error = headroom.BudgetTooSmallError("too small", 7)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(again) == "too small" and again.required_bytes == 7
    assert issubclass(headroom.InvalidTargetError, ValueError) and issubclass(headroom.HeadroomError, Exception)


def test_check_targets_names_row_and_value():
    headroom.check_targets(torch.tensor([[0, 4], [-100, 3]]), 5)
    with pytest.raises(headroom.InvalidTargetError, match=r"got 5 for row 2"):
        headroom.check_targets(torch.tensor([[0, -100], [5, 9]]), 5)
    with pytest.raises(headroom.InvalidTargetError, match=r"got -100 for row 0"):
        headroom.check_targets(torch.tensor([-100]), 5, ignore_index=-1)
