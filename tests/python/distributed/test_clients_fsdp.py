"""FSDP2: the head in the root unit, grouped with the norm, or in its own unit; its weight read inside and outside.

DistributedDataParallel needs no special support and is one more way to wrap the model.
"""

import logitless
import logitless.nn
import pytest
import torch
import torch.distributed as dist
from client_models import VOCAB, Model, alone, batch, train
from client_oracle import check_steps
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.slow


def shard(model, unit, mesh, **options):
    if unit == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    fully_shard(model.body, mesh=mesh, **options)
    if unit == "grouped":
        fully_shard([model.norm, model.lm_head], mesh=mesh, **options)
    elif unit != "root":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=unit != "kept", **options)
    return fully_shard(model, mesh=mesh, **options)


def steps(mesh, head, unit, reduction, tied, micro=1, divisor=None, grid=None, bias=False):
    if grid is not None:
        mesh = dist.init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
    by_head = {}
    for made in ("stock", head):
        model = Model(made, reduction, tied, bias)
        wrapped = shard(model, unit, mesh)
        if divisor is not None:
            for module in (model, model.body, *(() if unit == "root" else (model.lm_head,))):
                module.set_gradient_divide_factor(divisor)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products
        by_head[made] = train(wrapped, model, dist.get_rank(), micro=micro, sync=synchronization(wrapped, unit))
    return by_head["stock"], by_head[head]


def synchronization(wrapped, unit):
    """Returns a function that says whether gradients are synchronized."""
    if unit == "DDP":
        return lambda last: None if last else wrapped.no_sync()
    return wrapped.set_requires_gradient_sync


def check(ranks, head, unit, reduction="mean", tied=False, micro=1, bias=False, divisor=None, **options):
    true = alone(2, micro=micro, reduction=reduction, tied=tied, bias=bias, divisor=divisor)
    check_steps(ranks(steps, head, unit, reduction, tied, micro, divisor, options.get("grid"), bias), true)


UNITS = {
    "root": ("inside", "outside", "module"),
    "grouped": ("inside", "module"),
    "own": ("inside", "outside", "unshard", "module", "module with logits"),
    "kept": ("inside", "module with logits"),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("head", "unit"), [(head, unit) for unit, heads in UNITS.items() for head in heads])
def test_gradients_in_each_unit(two, head, unit, reduction):
    check(two, head, unit, reduction)


def test_a_bias(two):
    check(two, "inside", "own", bias=True)


@pytest.mark.parametrize("head", ["inside", "outside", "module"])
def test_tied_weights(two, head):
    check(two, head, "root", tied=True)


@pytest.mark.parametrize(("head", "unit"), [("inside", "own"), ("module", "own"), ("inside", "root")])
def test_accumulation_without_synchronization(two, head, unit):
    check(two, head, unit, micro=3)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("head", "reduction", "tied"), [
    ("inside", "mean", False), ("inside", "none", False), ("inside", "mean", True),
    ("module", "mean", False), ("module", "none", False),
])  # fmt: skip
def test_gradients_of_ddp_and_their_accumulation(two, head, reduction, tied, micro):
    """All parts but the last use no_sync; the second step follows on the first one's state."""
    check(two, head, "DDP", reduction, tied, micro, bias=True)


@pytest.mark.parametrize("head", ["inside", "module"])
def test_a_divisor_of_its_own(two, head):
    check(two, head, "own", divisor=5.0)


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_replicated_shards(two, grid):
    check(two, "inside", "own", grid=grid)


def mixed(mesh, head):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for made in ("stock", head):
        model = Model(made)
        wrapped = shard(model, "own", mesh, mp_policy=policy)
        results.append(train(wrapped, model, mesh.get_rank(), steps=1))
        assert model.lm_head.weight.grad.dtype == torch.float32
    return results


@pytest.mark.parametrize("head", ["inside", "module"])
def test_mixed_precision(two, head):
    """In bfloat16 all gradients have the body's own rounding: ours must be as close to float64 as the stock head's."""
    true = alone(2, steps=1)
    for stock, fused in two(mixed, head):
        for name, gradient in true.items():
            errors = [float((made[1][name] - gradient).abs().max()) for made in (fused, stock)]
            assert errors[0] <= 2 * errors[1] + 2**-8 * float(gradient.abs().max()), name


def collectives(mesh, head, reduction):
    """Returns the collectives on the head in a call and its backward pass. The model's other parameters are not
    sharded."""
    model = Model(head, reduction)
    fully_shard(model.lm_head, mesh=mesh)
    with CommDebugMode() as counted:
        model(*batch(mesh.get_rank(), 0)).mean().backward()
    counts = {str(name).split(".")[-1]: count for name, count in counted.get_comm_counts().items() if count}
    return counts, model.lm_head.weight.grad.full_tensor()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_weight_is_gathered_once(two, reduction):
    """This includes a head that is the only FSDP unit."""
    true = alone(2, steps=1, reduction=reduction)["lm_head.weight"]
    for counts, gradient in two(collectives, "inside", reduction):
        assert counts == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        torch.testing.assert_close(gradient.double(), true)


REFUSALS = (TypeError, ValueError, NotImplementedError)


def refusals(mesh):
    def refused(message, hidden, weight, error=logitless.UnsupportedError):
        with pytest.raises(error, match=f"(?s){message}"):
            logitless.linear_cross_entropy(hidden, weight, torch.tensor([1, 2]))

    with pytest.raises((TypeError, ValueError), match="^linear: expected"):
        logitless.nn.FusedHead.from_linear(fully_shard(torch.nn.Linear(8, VOCAB), mesh=mesh))
    hidden = torch.ones(2, 8)
    linear = lambda **options: fully_shard(torch.nn.Linear(8, VOCAB), mesh=mesh, **options)  # noqa: E731
    weight, outside = linear().weight, "^weight: an FSDP parameter outside"
    refused(f"{outside} its module", DTensor.from_local(hidden, mesh, [Shard(0)]), weight)
    known = "whether its ranks hold the same tokens or tokens of their own is unknown"
    refused(known, hidden, weight[:5], REFUSALS)
    offloaded = linear(offload_policy=CPUOffloadPolicy(pin_memory=False)).weight
    refused(r"offloaded to the CPU.*unshard\(\)", hidden, offloaded, REFUSALS)
    grid = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    head = parallelize_module(torch.nn.Linear(8, VOCAB), grid["tensor"], ColwiseParallel())
    fully_shard(head, mesh=grid["data"])
    both = "also sharded over a tensor-parallel mesh"
    refused(both, hidden, head.weight, REFUSALS)
    refused(outside, DTensor.from_local(hidden, grid["tensor"], [Replicate()]), head.weight)
    one = linear()
    one.unshard()
    kept = one.weight
    one.reshard()
    refused("freed", hidden, kept, REFUSALS)


def test_what_is_not_known_is_refused(two):
    two(refusals)
