"""Bad arguments give an error with argument, expected and got, with and without gradients, in all interfaces."""

import copy
import functools
import pickle
import re

import divergence_oracle
import logitless
import logitless.numpy
import pytest
import torch
from support import lce

ROWS, VOCAB, HIDDEN = 4, 7, 5
INPUT, WEIGHT = torch.randn(ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN)
TARGET = torch.tensor([0, 1, 2, 6])
NEEDS_GRAD = "expected a tensor that does not require grad, got one that does"
INF, NAN = float("inf"), float("nan")


def number(value, **options):
    return torch.tensor(value, requires_grad=True, **options)


def as_arrays(arguments):
    return {n: v.detach().numpy() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}


def ids(table):
    return [f"{'-'.join(changes)} {i}" for i, (changes, *_) in enumerate(table)]


SPARSIFIED = {"gradient": "always-sparsified"}
TWO = torch.zeros(ROWS, 2, dtype=torch.int64)
RANGE = "expected 0 <= target < 7 or ignore_index -100, got"


def of_several(target, **more):
    return {"targets": target, "target_weight": torch.ones(target.shape)} | more


# Errors that PyTorch's tensors and numpy's arrays share.
BAD = [
    ({"hidden": INPUT.long()}, TypeError, "hidden: expected float32"),
    ({"hidden": INPUT[:, :4]}, ValueError, r"hidden: expected shape \[..., D\] with D = 5.* got \[4, 4\]"),
    ({"hidden": torch.tensor(1.0)}, ValueError, "hidden: expected shape"),
    ({"weight": WEIGHT[0]}, ValueError, r"weight: expected shape \[V, D\], got \[5\]"),
    ({"weight": WEIGHT[:0]}, ValueError, r"weight: .* V >= 1 and D >= 1, got \[0, 5\]"),
    ({"weight": WEIGHT[:, :0], "hidden": INPUT[:, :0]}, ValueError, r"weight: .* D >= 1, got \[7, 0\]"),
    ({"weight": WEIGHT.double()}, TypeError, "weight: expected float64 for all"),
    ({"targets": TARGET.float()}, TypeError, "targets: expected int64 or int32 class indices, got .*float32"),
    ({"targets": TARGET[:3]}, ValueError, r"targets: expected shape \[4\] .* got \[3\]"),
    ({"bias": torch.zeros(6)}, ValueError, r"bias: expected shape \[7\] \(V\), got \[6\]"),
    ({"bias": torch.zeros(7).double()}, TypeError, "bias: expected float64 for all"),
    ({"bias": torch.zeros(7, dtype=torch.complex64)}, TypeError, "bias: expected float32, .*complex64"),
    ({"class_weight": torch.ones(5)}, ValueError, r"class_weight: expected shape \[7\]"),
    ({"class_weight": torch.ones(7, dtype=torch.complex64)}, TypeError, "class_weight: expected real numbers"),
    ({"token_weight": torch.ones(3)}, ValueError, r"token_weight: expected shape \[4\]"),
    ({"token_weight": torch.ones(4, dtype=torch.complex64)}, TypeError, "token_weight: expected real numbers"),
    ({"reduction": "avg"}, ValueError, "reduction: expected one of"),
    ({"reduction": ["mean"]}, ValueError, "reduction: expected one of"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got 1.5"),
    ({"label_smoothing": "a lot"}, TypeError, "label_smoothing: expected a number, got str"),
    ({"scale": INF}, ValueError, "scale: expected a finite number"),
    ({"scale": 10**400}, ValueError, "scale: expected a number of float64's range"),
    ({"softcap": -1.0}, ValueError, "softcap: expected a finite number >= 0"),
    ({"z_loss": -1.0}, ValueError, "z_loss: expected"),
    ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0, got 0"),
    ({"temperature": -1.0}, ValueError, "temperature: expected a finite number > 0, got -1"),
    ({"temperature": NAN}, ValueError, "temperature: expected a finite number > 0, got nan"),
    ({"temperature": 1e-39}, ValueError, "temperature: expected .* got 1e-39"),
    ({"temperature": "hot"}, TypeError, "temperature: expected a number, got str"),
    ({"temperature": torch.ones(3)}, ValueError, r"temperature: expected shape \[4\] \(that of targets, or .*\[3\]"),
    ({"temperature": torch.ones(4, dtype=torch.complex64)}, TypeError, "temperature: expected real numbers"),
    ({"num_items": -1, "reduction": "mean"}, ValueError, "num_items: expected a finite number >= 0, got -1"),
    ({"num_items": INF, "reduction": "mean"}, ValueError, "num_items: expected a finite number >= 0, got inf"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items: expected None unless"),
    ({"shift": -1}, ValueError, "shift: expected"),
    ({"shift": 1.5}, TypeError, "shift: expected an integer, got float"),
    ({"shift": 2**63}, ValueError, f"shift: expected an integer of 64 bits, got {2**63}"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an integer"),
    ({"ignore_index": 2**64}, ValueError, f"ignore_index: expected an integer of 64 bits, got {2**64}"),
    ({"max_workspace_bytes": 2**64 + 4096}, ValueError, "max_workspace_bytes: expected an integer of 64 bits"),
    ({"max_workspace_bytes": 1}, logitless.BudgetTooSmallError, "max_workspace_bytes: expected at least"),
    ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool, got int"),
    ({"return_stats": "nll"}, TypeError, "return_stats: expected a bool or a sequence"),
    ({"return_stats": None}, TypeError, "return_stats: expected a bool or a sequence of names, got None"),
    ({"return_stats": ["nil"]}, ValueError, "return_stats: expected names out of"),
    ({"return_stats": [["nll"]]}, ValueError, "return_stats: expected names out of"),
    ({"return_stats": ["kept_count"]}, ValueError, "return_stats: expected kept_count only with gradient"),
    ({"seed": 1}, ValueError, 'seed: expected None unless gradient is "sparsified"'),
    (SPARSIFIED | {"seed": 1.5}, TypeError, "seed: expected an integer, got float"),
    (SPARSIFIED | {"seed": "a"}, TypeError, "seed: expected an integer, got str"),
    (SPARSIFIED | {"seed": True}, TypeError, "seed: expected an integer, got bool"),
    (SPARSIFIED | {"seed": 1 << 63}, ValueError, "seed: expected an integer of 64 bits"),
    (SPARSIFIED | {"softcap": 5.0, "label_smoothing": 0.1}, ValueError, "label_smoothing: expected 0"),
    (of_several(torch.rand(4, 7)), TypeError, "probabilities of the whole vocabulary are not supported"),
    ({"targets": torch.rand(4)}, TypeError, "targets: expected int64 or int32"),
    (of_several(torch.zeros(4, 65).long()), ValueError, "targets: expected at most 64 targets"),
    (of_several(TWO[:, :0]), ValueError, "targets: expected at most 64 targets"),
    (of_several(TWO[:3]), ValueError, r"targets: expected shape \[4\]"),
    ({"targets": TWO}, ValueError, "got .*; several targets a row need target_weight"),
    (of_several(TWO, target_weight=torch.ones(4, 3)), ValueError, r"target_weight: expected shape \[4, 2\]"),
    ({"target_weight": torch.ones(4)}, ValueError, "target_weight: expected None with one"),
    (of_several(TWO, class_weight=torch.ones(7)), ValueError, "class_weight: expected None with several targets"),
    (of_several(TWO, gradient="sparsified"), ValueError, 'gradient: expected "exact" with several targets'),
    (of_several(TWO + 7 * torch.eye(4, 2).flip(0).long()), ValueError, rf"targets: {RANGE} 7 at targets\[2, 1\]"),
    (of_several(TWO - 1), ValueError, rf"targets: {RANGE} -1 at targets\[0, 0\]"),
]  # fmt: skip
OF_TENSORS = [
    ({"hidden": [[1.0]]}, TypeError, "hidden: expected a torch.Tensor, got list"),
    ({"hidden": None}, TypeError, "hidden: expected a torch.Tensor, got NoneType"),
    ({"weight": None}, TypeError, "weight: expected a torch.Tensor, got NoneType"),
    ({"targets": None}, TypeError, "targets: expected a torch.Tensor, got NoneType"),
    (
        {"hidden": INPUT.to("meta")},
        ValueError,
        "hidden: expected a tensor on the CPU or a CUDA device, got device meta",
    ),
    ({"weight": WEIGHT.to("meta")}, ValueError, "weight: .* meta: it holds no values, .* offloaded"),
    ({"bias": torch.zeros(7, device="meta")}, ValueError, "bias: .* device meta: it holds no values"),
    ({"weight": WEIGHT.to_sparse()}, TypeError, "weight: expected a dense tensor"),
    ({"token_weight": torch.ones(4, requires_grad=True)}, ValueError, f"token_weight: {NEEDS_GRAD}"),
    (of_several(TWO, target_weight=torch.ones(4, 2, requires_grad=True)), ValueError, f"target_weight: {NEEDS_GRAD}"),
    (of_several(TWO, target_weight=[1.0]), TypeError, "target_weight: expected a torch.Tensor"),
    ({"main_grad": torch.zeros(7, 5).half()}, TypeError, "main_grad: expected torch.float32"),
    ({"main_grad": torch.zeros(5, 7).T}, ValueError, "main_grad: expected contiguous rows"),
    ({"main_grad": torch.zeros(6, 5)}, ValueError, r"main_grad: expected shape \[7, 5\]"),
    ({"scale": number(0.0)}, ValueError, "scale: expected a magnitude of at least 2.-64 .* got 0.0"),
    ({"scale": number(1e-30)}, ValueError, "scale: expected a magnitude of at least 2.-64 .* got 1.0"),
    ({"scale": number(NAN)}, ValueError, "scale: expected .* got nan"),
    ({"scale": torch.ones(2, requires_grad=True)}, ValueError, r"scale: expected one element, got shape \[2\]"),
    ({"scale": torch.tensor(1j)}, TypeError, "scale: expected a number, got torch.complex64"),
    ({"scale": torch.tensor(1.0, device="meta")}, ValueError, "scale: .* got device meta"),
    ({"temperature": torch.tensor(0.0)}, ValueError, "temperature: expected a finite number > 0, got 0"),
    ({"temperature": torch.ones(4, requires_grad=True)}, ValueError, f"temperature: {NEEDS_GRAD[:20]}"),
    ({"temperature": torch.ones(4, device="meta")}, ValueError, "temperature: .* got device meta"),
    ({"temperature": number(1.0), "softcap": 2.0}, ValueError, "temperature: expected .* softcap 2.0"),
    ({"num_items": torch.tensor(-3), "reduction": "mean"}, ValueError, "num_items: expected a finite number >= 0.*-3"),
    ({"num_items": torch.ones(2), "reduction": "mean"}, ValueError, "num_items: expected one element"),
    ({"num_items": torch.tensor(3), "reduction": "sum"}, ValueError, "num_items: expected None unless"),
    (SPARSIFIED | {"seed": torch.tensor([1, 2])}, ValueError, r"seed: expected one int64 element, got .*\[2\]"),
    (SPARSIFIED | {"seed": torch.tensor(1.0)}, ValueError, "seed: expected one int64 element, got"),
]
for _name in ("scale", "temperature"):
    OF_TENSORS.append(({_name: torch.tensor(True)}, TypeError, f"{_name}: expected a number, got torch.bool"))
for _name in ("z_loss", "softcap", "label_smoothing", "threshold", "num_items"):
    _more = {"reduction": "mean"} | (SPARSIFIED if _name == "threshold" else {})
    OF_TENSORS.append(({_name: number(0.5)} | _more, ValueError, f"{_name}: {NEEDS_GRAD}"))
for _name in ("label_smoothing", "z_loss", "scale", "softcap", "num_items", "shift", "ignore_index"):
    OF_TENSORS.append(({_name: True, "reduction": "mean"}, TypeError, f"{_name}: expected"))
OF_ARRAYS = [
    ({"grad_loss": 1j, "gradients": True}, TypeError, "grad_loss: expected real numbers, got complex128"),
    ({"num_items": torch.ones((), dtype=torch.complex64)}, TypeError, "num_items: expected a number, got array"),
    ({"gradients": ["bias"]}, ValueError, "gradients: expected names out of hidden, weight, got"),
    ({"backend": "quantum"}, logitless.BackendUnavailableError, "quantum"),
]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("changes, error, message", BAD + OF_TENSORS, ids=ids(BAD + OF_TENSORS))
def test_losses(changes, error, message, reduction):
    """The errors also occur after right calls, whose preparation is kept, and when they repeat."""
    plain = {"weight": WEIGHT, "targets": TARGET, "reduction": reduction}
    for requires_grad in (True, False):
        arguments = plain | {"hidden": INPUT.clone().requires_grad_(requires_grad)}
        for _ in range(2):
            lce(**arguments)
            with pytest.raises(error, match=message):
                lce(**arguments | changes)


@pytest.mark.parametrize("changes, error, message", BAD + OF_ARRAYS, ids=ids(BAD + OF_ARRAYS))
def test_losses_of_arrays(changes, error, message):
    arguments = {"hidden": INPUT, "weight": WEIGHT, "targets": TARGET} | changes
    with pytest.raises(error, match=message):
        logitless.numpy.linear_cross_entropy(**as_arrays(arguments))


BAD_IDS = [
    ({"ids": TARGET}, ValueError, r"ids: expected shape \[4, K\]"),
    ({"ids": torch.zeros(5, 2).long()}, ValueError, r"ids: expected shape \[4\]"),
    ({"ids": torch.zeros(4, 65).long()}, ValueError, "ids: expected at most 64"),
    ({"ids": torch.zeros(4, 2)}, TypeError, "ids: expected int64 or int32"),
    ({"ids": TWO + torch.tensor([[0], [0], [0], [40]])}, ValueError, rf"ids: {RANGE} 40 at ids\[3, 0\]"),
]
BAD_TOP_K = [
    ({"k": 0}, ValueError, r"k: expected a number in \[1, 7\]"),
    ({"k": 65, "weight": torch.zeros(70, 5)}, ValueError, r"k: expected a number in \[1, 64\]"),
    ({"k": 2.0}, TypeError, "k: expected an integer"),
    ({"k": 4, "weight": WEIGHT[:3]}, ValueError, r"k: expected a number in \[1, 3\]"),
]
OF_HEADS = [row for row in BAD[:12] if "targets" not in row[0] and row[2] != "hidden: expected shape"] + [
    ({"temperature": torch.ones(3)}, ValueError, r"temperature: expected shape \[4\]"),
    ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0"),
    ({"max_workspace_bytes": -1}, ValueError, "max_workspace_bytes"),
]


def check_heads(name, arguments, error, message):
    arguments = {"hidden": INPUT, "weight": WEIGHT} | arguments
    with pytest.raises(error, match=message):
        getattr(logitless, name)(**arguments)
    with pytest.raises(error, match=message):
        getattr(logitless.numpy, name)(**as_arrays(arguments))


@pytest.mark.parametrize("changes, error, message", BAD_IDS + OF_HEADS, ids=ids(BAD_IDS + OF_HEADS))
def test_log_probs(changes, error, message):
    check_heads("linear_log_probs", {"ids": TWO} | changes, error, message)


@pytest.mark.parametrize("changes, error, message", BAD_TOP_K + OF_HEADS, ids=ids(BAD_TOP_K + OF_HEADS))
def test_largest_logits(changes, error, message):
    check_heads("linear_top_k", {"k": 2} | changes, error, message)


SHARED = [
    (SPARSIFIED | {"threshold": 2.0}, ValueError, r"threshold: expected a number in \[2\^-126, 1\], got 2"),
    (SPARSIFIED | {"threshold": "2^-9"}, TypeError, "threshold: expected a number, got str"),
    (
        {"gradient": "sparse"},
        ValueError,
        'gradient: expected one of "exact", "sparsified", "always-sparsified", got .sparse',
    ),
    (
        {"batch_invariant": True, "gradient": "sparsified"},
        ValueError,
        "batch_invariant: expected False unless gradient",
    ),
    (SPARSIFIED | {"screen": "int8"}, ValueError, 'screen: expected one of "none", "fp8", got .int8'),
    ({"screen": "fp8"}, ValueError, 'screen: expected "none" unless gradient is "sparsified", got "fp8" with "exact"'),
    ({"max_workspace_bytes": 2.5}, TypeError, "max_workspace_bytes: expected .*, got float"),
    ({"max_workspace_bytes": 0}, ValueError, "max_workspace_bytes: expected a positive number of bytes"),
    ({"max_workspace_bytes": -1}, ValueError, "max_workspace_bytes: expected a positive number of bytes"),
]
for _value in (0, 5, -1, NAN, 2.0**-150, 1e-40, 1e-320):
    for _gradient in ("exact", "sparsified"):
        SHARED.append(({"threshold": _value, "gradient": _gradient}, ValueError, "threshold: expected a number"))
for _text in ",lots,MiB,1.2.3k,-1MB,1e6,0,0MiB,256 M iB,1PB,5000TiB ,9999999TiB,Fastest".split(","):
    _message = f"max_workspace_bytes: expected .*, a size such as .*got {re.escape(repr(_text))}"
    SHARED.append(({"max_workspace_bytes": _text}, ValueError, _message))
INTERFACES = {
    "with gradients": lambda **options: lce(INPUT.clone().requires_grad_(), WEIGHT, TARGET, **options),
    "without": lambda **options: lce(INPUT, WEIGHT, TARGET, **options),
    "numpy": functools.partial(logitless.numpy.linear_cross_entropy, *(t.numpy() for t in (INPUT, WEIGHT, TARGET))),
    "plan": lambda **options: logitless.plan(ROWS, VOCAB, HIDDEN, **options),
    "plans": lambda **options: logitless.plans(ROWS, VOCAB, HIDDEN, **options),
    "head": lambda **options: logitless.nn.FusedHead(HIDDEN, VOCAB, **options),
    "module": lambda **options: logitless.LinearCrossEntropyLoss(HIDDEN, VOCAB, **options),
}


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("options, error, message", SHARED, ids=ids(SHARED))
def test_options_of_every_interface(options, error, message, interface):
    with pytest.raises(error, match=message):
        INTERFACES[interface](**options)


BAD_PLANS = [
    ({"tokens": "8Ki"}, TypeError, "tokens: expected an integer, got str"),
    ({"hidden": 16.0}, TypeError, "hidden: expected an integer, got float"),
    ({"vocab": 0}, logitless.InvalidArgumentError, "vocab"),
    ({"dtype": "int8"}, TypeError, "dtype"),
    ({"gradients": ["weights"]}, ValueError, "gradients"),
    ({"top_k": 8}, logitless.InvalidArgumentError, "top_k: expected 0 in a pass with gradients"),
    ({"gradients": (), "top_k": 65}, logitless.InvalidArgumentError, "top_k: expected a number in .0, 64."),
    ({"gradients": (), "top_k": 1.5}, TypeError, "top_k: expected an integer"),
    ({"targets_per_row": 65}, logitless.InvalidArgumentError, "targets_per_row: expected a number in .0, 64."),
    ({"device": "h9000"}, logitless.InvalidArgumentError, "one of a100, .*, b200; got 'h9000'"),
]
for _device in ("h20O", "gpu", "cuda:x", "h200:0"):
    _message = f"device: expected .*cuda:N.*rtx-4090.*; got '{_device.lower()}'"
    BAD_PLANS.append(({"device": _device}, ValueError, _message))
for _device in (1.5, True, [0]):
    BAD_PLANS.append(({"device": _device}, TypeError, "device: expected a torch.device, "))


@pytest.mark.parametrize("changes, error, message", BAD_PLANS, ids=ids(BAD_PLANS))
def test_plans(changes, error, message):
    with pytest.raises(error, match=message):
        logitless.plan(**{"tokens": 64, "vocab": 1000, "hidden": 32} | changes)


HEAD, MODULE = logitless.nn.FusedHead, logitless.LinearCrossEntropyLoss
BAD_MODULES = [
    (HEAD, {"class_weight": torch.ones(3)}, ValueError, r"class_weight: expected shape \[7\]"),
    (HEAD, {"dtype": "bf17"}, TypeError, "dtype: expected float32, bfloat16, float16 or float64, got bf17"),
    (MODULE, {"class_weight": torch.ones(3)}, ValueError, r"class_weight: expected shape \[7\]"),
    (MODULE, {"out_features": (2,)}, NotImplementedError, "out_features: expected"),
]
for _made in (HEAD, MODULE):
    BAD_MODULES.append((_made, {"label_smoothing": 2.0}, ValueError, "label_smoothing: expected"))
    BAD_MODULES.append((_made, {"reduction": "avg"}, ValueError, "reduction: expected"))


@pytest.mark.parametrize("made, options, error, message", BAD_MODULES)
def test_options_of_modules(made, options, error, message):
    with pytest.raises(error, match=message):
        made(HIDDEN, VOCAB, **options)


def weights(vocab=50, width=12, **more):
    return torch.zeros(vocab, width, **more)


BAD_DIVERGENCES = [
    ({"student_weight": weights(width=9)}, ValueError, r"student_hidden: expected shape \[..., D\] with D = 9"),
    ({"teacher_weight": weights(width=9)}, ValueError, r"teacher_hidden: expected shape \[..., D\] with D = 9"),
    ({"teacher_weight": weights(49, 20), "teacher_bias": None}, ValueError, "teacher_weight: expected V = 50 .*49"),
    ({"teacher_hidden": torch.zeros(6, 20)}, ValueError, r"teacher_hidden: expected shape \[7\]"),
    ({"student_bias": torch.zeros(3)}, ValueError, r"student_bias: expected shape \[50\]"),
    ({"teacher_bias": [1.0]}, TypeError, "teacher_bias: expected a torch.Tensor, got list"),
    ({"teacher_hidden": torch.zeros(7, 20).double()}, TypeError, "teacher_hidden: expected float64 for all tensors"),
    ({"student_hidden": torch.zeros(7, 12).long()}, TypeError, "student_hidden: expected float32"),
    ({"teacher_weight": weights(width=20).requires_grad_()}, ValueError, r"teacher_weight.*pass teacher_weight.detach"),
    ({"teacher_hidden": torch.zeros(7, 20, requires_grad=True)}, ValueError, "teacher_hidden: expected a tensor that"),
    ({"student_weight": weights(0)}, ValueError, r"student_weight: expected shape \[V, D\] with V >= 1"),
    ({"student_weight": weights(device="meta")}, ValueError, "student_weight: .*device meta"),
    ({"beta": -0.1}, ValueError, r"beta: expected 0, or a number in \[2\^-100, 1\], got -0.1"),
    ({"beta": 1.5}, ValueError, "beta: expected 0"),
    ({"beta": NAN}, ValueError, "beta: expected 0"),
    ({"beta": "jsd"}, TypeError, "beta: expected a number, got str"),
    ({"temperature": 0}, ValueError, "temperature: expected a finite number > 0"),
    ({"student_softcap": -1.0}, ValueError, "student_softcap: expected 0, or a positive number"),
    ({"teacher_scale": INF}, ValueError, "teacher_scale: expected a finite number"),
    ({"mask": torch.ones(6)}, ValueError, r"mask: expected shape \[7\]"),
    ({"token_weight": torch.ones(7, requires_grad=True)}, ValueError, f"token_weight: {NEEDS_GRAD[:20]}"),
    ({"reduction": "batchmean"}, ValueError, "reduction: expected one of"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items: expected None unless"),
    ({"max_workspace_bytes": 0}, ValueError, "max_workspace_bytes: expected a positive number"),
    ({"max_workspace_bytes": 1}, logitless.BudgetTooSmallError, "max_workspace_bytes: expected at least"),
    ({"return_stats": ("entropy",)}, TypeError, "return_stats: expected a bool"),
]  # fmt: skip


@pytest.mark.parametrize("changes, error, message", BAD_DIVERGENCES, ids=ids(BAD_DIVERGENCES))
def test_divergences(changes, error, message):
    with pytest.raises(error, match=message):
        logitless.linear_divergence(**divergence_oracle.make().leaves() | changes)


# ---- storage, subclasses, places of targets


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["hidden", "weight", "targets", "bias", "class_weight", "token_weight", "main_grad"])
def test_freed_storage_is_named(name, known):
    def arguments():
        tensors = {"hidden": INPUT.clone(), "weight": WEIGHT.clone(), "targets": TARGET.clone()}
        for tensor in (tensors["hidden"], tensors["weight"]):
            tensor.requires_grad_(name == "main_grad")
        if name not in tensors:
            tensors[name] = torch.ones({"main_grad": (7, 5), "token_weight": (4,)}.get(name, (7,)))
        return tensors

    def run(arguments):
        loss = lce(**arguments)
        if loss.requires_grad:
            loss.backward()

    if known:
        run(arguments())
    freed = arguments()
    freed[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor in memory, got one whose storage was freed"):
        run(freed)


@pytest.fixture
def mesh():
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_dtensor_among_plain_tensors_is_refused_with_what_to_pass(mesh):
    """to_local() of a sharded tensor is only a part of it: for a head, a slice of the vocabulary."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def distributed(tensor, placement):
        return DTensor.from_local(tensor, mesh, [placement], run_check=False)

    input = INPUT.clone().requires_grad_()
    for placement in (Shard(0), Replicate()):
        with pytest.raises(TypeError, match="^weight: expected a plain tensor or an FSDP parameter") as error:
            lce(input, distributed(WEIGHT, placement), TARGET)
        ways = ("DTensor.from_local(hidden, mesh, [Replicate()])", "group=mesh.get_group()", "unshard")
        for part in (repr(placement), *ways):
            assert part in str(error.value), str(error.value)
    with pytest.raises(TypeError, match="^weight: expected a DTensor on the mesh of hidden, got a plain tensor"):
        lce(distributed(INPUT, Shard(0)), WEIGHT, TARGET)
    with pytest.raises(TypeError, match=r"bias: .*Shard\(dim=0\).* pass bias.full_tensor\(\)"):
        lce(INPUT, WEIGHT, TARGET, bias=distributed(torch.zeros(7), Shard(0)))
    with pytest.raises(TypeError, match=r"scale: .* pass scale.to_local\(\)"):
        lce(INPUT, WEIGHT, TARGET, scale=distributed(torch.tensor(1.0), Replicate()))


def test_other_subclasses_and_nested_tensors_are_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match="^weight: .* got TwoTensor .unwrap or dequantise"):
        lce(INPUT, TwoTensor(WEIGHT, WEIGHT), TARGET)
    nested = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(1, 5)], layout=torch.jagged)
    with pytest.raises(TypeError, match="hidden: expected a dense tensor"):
        lce(nested, WEIGHT, TARGET)


COMPILED = pytest.param("compiled", marks=pytest.mark.slow)


@pytest.mark.parametrize("interface", ["torch", "numpy", COMPILED, "no gradients", "kept"])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("shape, place", [((4,), (3,)), ((2, 4), (1, 2)), ((2, 2, 3), (1, 0, 2)), ((), ())], ids=str)
def test_a_bad_target_is_named_by_its_own_place(shape, place, shift, interface):
    if shape == () and shift > 0:
        return  # nothing is predicted
    input = torch.randn(*shape, 5, requires_grad=interface == "torch")
    call, arguments = lce, [input, WEIGHT, torch.zeros(shape).long()]
    if interface == "kept":
        lce(*arguments, shift=shift)
    elif interface == "numpy":
        call, arguments = logitless.numpy.linear_cross_entropy, [a.numpy() for a in arguments]
    elif interface == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    for bad in (77, 7, -1, 2**40, -(2**40)):
        arguments[2][place] = bad
        with pytest.raises(logitless.InvalidTargetError) as error:
            call(*arguments, shift=shift)
        expected = f"targets: expected 0 <= target < 7 or ignore_index -100, got {bad} at targets{list(place)}"
        assert str(error.value) == expected


def test_check_targets_names_place_and_value():
    logitless.check_targets(torch.tensor([[0, 4], [-100, 3]]), 5)
    with pytest.raises(logitless.InvalidTargetError, match=r"targets: .* got 5 at targets\[1, 0\]"):
        logitless.check_targets(torch.tensor([[0, -100], [5, 9]]), 5)
    with pytest.raises(logitless.InvalidTargetError, match=r"got -100 at targets\[0\]"):
        logitless.check_targets(torch.tensor([-100]), 5, ignore_index=-1)


@pytest.mark.parametrize("rows", [(), (4,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 2, VOCAB])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_dimension_of_targets_too_many_is_a_mistake(rows, count, reduction):
    """Only their weights say that a row has several targets."""
    input, target = torch.randn(*rows, HIDDEN), torch.zeros(*rows, count, dtype=torch.int64)
    arrays = input.numpy(), WEIGHT.numpy(), target.numpy()
    calls = {
        "function": lambda: lce(input, WEIGHT, target, reduction=reduction),
        "module": lambda: MODULE(HIDDEN, VOCAB, reduction=reduction)(input, target),
        "head": lambda: HEAD(HIDDEN, VOCAB, reduction=reduction)(input, target),
        "numpy": lambda: logitless.numpy.linear_cross_entropy(*arrays, reduction=reduction),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="(targets|labels): expected .*target_weight"):
            call()
    if (reduction, count) == ("mean", 2):
        with pytest.raises(Exception, match="targets: expected .*target_weight"):
            torch.compile(lce, backend="eager")(input, WEIGHT, target)


# ---- the errors themselves


def test_errors_pickle():
    error = logitless.BudgetTooSmallError("too small", 7)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(again) == "too small" and again.required_bytes == 7
    assert issubclass(logitless.InvalidTargetError, ValueError) and issubclass(logitless.LogitlessError, Exception)


def test_errors_are_data():
    with pytest.raises(logitless.InvalidArgumentError) as refusal:
        logitless.plan(4, 5, 6, gradients=(), top_k=65)
    error = refusal.value
    assert (error.argument, error.expected, error.got) == ("top_k", "a number in [0, 64]", "65")
    assert error.required_bytes is None and error.row is None
