"""Bad arguments: TypeError or ValueError naming argument, expected and got."""

import copy
import pickle

import logitless
import pytest
import torch

INPUT, WEIGHT = torch.randn(4, 5), torch.randn(7, 5)
TARGET = torch.tensor([0, 1, 2, 6])


def call(input=INPUT, weight=WEIGHT, target=TARGET, **options):
    return logitless.linear_cross_entropy(input, weight, target, **options)


BAD = [
    ({"input": [[1.0]]}, TypeError, "input: expected a torch.Tensor, got list"),
    ({"input": INPUT.long()}, TypeError, "input: expected float32"),
    ({"input": INPUT.to("meta")}, ValueError, "input: expected a tensor on the CPU or a CUDA device, got device meta"),
    ({"weight": WEIGHT.to("meta")}, ValueError, "linear_weight: .* device meta: it holds no values, .* offloaded"),
    ({"linear_bias": torch.zeros(7, device="meta")}, ValueError, "linear_bias: .* device meta: it holds no values"),
    ({"weight": WEIGHT.to_sparse()}, TypeError, "linear_weight: expected a dense tensor"),
    ({"input": INPUT[:, :4]}, ValueError, r"input: expected shape \[..., D\] with D = 5 .* got \[4, 4\]"),
    ({"input": torch.tensor(1.0)}, ValueError, "input: expected shape"),
    ({"weight": WEIGHT[0]}, ValueError, r"linear_weight: expected shape \[V, D\], got \[5\]"),
    ({"weight": torch.randn(0, 5)}, ValueError, r"linear_weight: .* V >= 1 and D >= 1, got \[0, 5\]"),
    ({"weight": torch.randn(7, 0), "input": torch.randn(4, 0)}, ValueError, r"linear_weight: .* D >= 1, got \[7, 0\]"),
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
    ({"num_items": -1}, ValueError, "num_items: expected a finite number >= 0, got -1"),
    ({"num_items": float("inf")}, ValueError, "num_items: expected a finite number >= 0, got inf"),
    ({"num_items": torch.tensor(-3)}, ValueError, "num_items: expected a finite number >= 0, got -3"),
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
    ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool, got int"),
    (
        {"batch_invariant": True, "gradient": "thinned"},
        ValueError,
        "batch_invariant: expected False unless gradient is",
    ),
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


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "name", ["input", "linear_weight", "target", "linear_bias", "weight", "token_weight", "main_grad"]
)
def test_freed_storage_is_named(name, known):
    def arguments():
        input = torch.randn(4, 5, requires_grad=name == "main_grad")
        weight = torch.randn(7, 5, requires_grad=name == "main_grad")
        found = {"input": input, "linear_weight": weight, "target": torch.zeros(4, dtype=torch.long)}
        if name not in found:
            found[name] = torch.ones({"main_grad": (7, 5), "token_weight": (4,)}.get(name, (7,)))
        return found

    def run(arguments):
        loss = logitless.linear_cross_entropy(**arguments)
        if loss.requires_grad:
            loss.backward()

    if known:
        run(arguments())
    freed = arguments()
    freed[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor in memory, got one whose storage was freed"):
        run(freed)


def test_class_weight_shape():
    with pytest.raises(ValueError, match=r"weight: expected shape \[7\]"):
        logitless.linear_cross_entropy(INPUT, WEIGHT, TARGET, weight=torch.ones(5))


@pytest.fixture
def mesh():
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def distributed(tensor, mesh, dim):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(tensor, mesh, [Replicate() if dim is None else Shard(dim)], run_check=False)


def test_dtensor_among_plain_tensors_is_refused_with_what_to_pass(mesh):
    """to_local() of a sharded tensor is a part of it: of a head, a slice of the vocabulary."""
    input = INPUT.clone().requires_grad_()
    for dim, placement in ((0, "Shard(dim=0)"), (None, "Replicate()")):
        with pytest.raises(TypeError, match="linear_weight: expected a plain tensor or an FSDP parameter") as error:
            call(input, distributed(WEIGHT, mesh, dim))
        for part in (placement, "DTensor.from_local(input, mesh, [Replicate()])", "group=mesh.get_group()", "unshard"):
            assert part in str(error.value), str(error.value)
    with pytest.raises(TypeError, match=r"linear_weight: expected a DTensor on the mesh of input, got a plain tensor"):
        call(distributed(INPUT, mesh, 0))
    with pytest.raises(TypeError, match=r"linear_bias: .*Shard\(dim=0\).* pass linear_bias.full_tensor\(\)"):
        call(linear_bias=distributed(torch.zeros(7), mesh, 0))
    with pytest.raises(TypeError, match=r"scale: .* pass scale.to_local\(\)"):
        call(scale=distributed(torch.tensor(1.0), mesh, None))


def test_another_subclass_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match="linear_weight: .* got TwoTensor .unwrap or dequantise"):
        call(weight=TwoTensor(WEIGHT, WEIGHT))


@pytest.mark.parametrize("interface", ["torch", "numpy", "compiled"])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("shape, place", [((4,), (3,)), ((2, 4), (1, 2)), ((2, 2, 3), (1, 0, 2)), ((), ())], ids=str)
def test_a_bad_target_is_named_by_its_own_place(shape, place, shift, interface):
    if shape == () and shift > 0:
        return  # nothing is predicted
    input, target = torch.randn(*shape, 5), torch.zeros(shape, dtype=torch.int64)
    target[place] = 77
    call = logitless.linear_cross_entropy
    arguments = (input, WEIGHT, target)
    if interface == "numpy":
        call, arguments = logitless.numpy.linear_cross_entropy, [a.numpy() for a in arguments]
    elif interface == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(logitless.InvalidTargetError) as error:
        call(*arguments, shift=shift)
    expected = f"target: expected 0 <= target < 7 or ignore_index -100, got 77 at target{list(place)}"
    assert str(error.value) == expected


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
        loss = logitless.linear_cross_entropy(input, weight, target, reduction=reduction, max_workspace_bytes=budget)
        loss.sum().backward()

    with pytest.raises(logitless.BudgetTooSmallError, match="max_workspace_bytes: expected at least") as error:
        run(1)
    required = error.value.required_bytes
    assert str(required) in str(error.value)
    with pytest.raises(logitless.BudgetTooSmallError):
        run(required - 1)
    for _ in range(2):  # the backward pass of reduction "none" may need more than the forward pass did
        try:
            run(required)
        except logitless.BudgetTooSmallError as second:
            required = second.required_bytes
    run(required)


def test_errors_pickle():
    error = logitless.BudgetTooSmallError("too small", 7)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(again) == "too small" and again.required_bytes == 7
    assert issubclass(logitless.InvalidTargetError, ValueError) and issubclass(logitless.LogitlessError, Exception)


def test_check_targets_names_place_and_value():
    logitless.check_targets(torch.tensor([[0, 4], [-100, 3]]), 5)
    with pytest.raises(logitless.InvalidTargetError, match=r"target: .* got 5 at target\[1, 0\]"):
        logitless.check_targets(torch.tensor([[0, -100], [5, 9]]), 5)
    with pytest.raises(logitless.InvalidTargetError, match=r"got -100 at target\[0\]"):
        logitless.check_targets(torch.tensor([-100]), 5, ignore_index=-1)


def test_main_grad_is_not_the_weight_itself():
    weight = torch.randn(13, 6, requires_grad=True)
    before = weight.detach().clone()
    target = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="main_grad: expected a buffer of its own, got one .* linear_weight"):
        logitless.linear_cross_entropy(torch.randn(4, 6), weight, target, main_grad=weight.detach())
    assert torch.equal(weight, before)
