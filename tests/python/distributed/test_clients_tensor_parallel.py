"""Heads of PyTorch's ColwiseParallel, alone and with FSDP2, beside loss_parallel."""

import logitless
import logitless.nn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from client_oracle import check_values, factors, loss_and_gradients, on
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

pytestmark = pytest.mark.slow

VOCAB, D = 13, 8


def problem():
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(VOCAB, D, generator=generator), torch.randn(3, 5, D, generator=generator)
    target = torch.randint(0, VOCAB, (3, 5), generator=generator)
    target[0, :2] = -100
    return hidden, weight, target


def made(kind, weight):
    head = torch.nn.Linear(D, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.copy_(weight)
    return logitless.nn.FusedHead.from_linear(head) if kind == "module" else head


def colwise(mesh, kind, output):
    hidden, weight, target = (t.to(mesh.device_type) for t in problem())
    hidden.requires_grad_()
    head = made(kind, weight).to(mesh.device_type)
    at = Replicate() if kind == "module" else Shard(-1)
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=at, use_local_output=output == "local"))
    if kind == "module":
        loss = head(hidden, labels=target)
    elif kind == "function":
        loss = logitless.linear_cross_entropy(DTensor.from_local(hidden, mesh, [Replicate()]), head.weight, target)
    else:
        with loss_parallel():
            loss = F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
            (loss * factors(torch.zeros(()))).backward()
    if kind != "stock":
        (loss * factors(torch.zeros(()))).backward()
    value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return [value.detach(), hidden.grad, head.weight.grad.full_tensor()], type(loss).__name__


@on("two")
@pytest.mark.parametrize(("kind", "output"), [("module", "local"), ("module", "DTensor"), ("function", "DTensor")])
def test_a_colwise_head(ranks, kind, output):
    theirs, true = (loss_and_gradients(*problem(), dtype=dtype) for dtype in (torch.float32, torch.float64))
    fused, stock = ranks(colwise, kind, output), ranks(colwise, "stock", "DTensor")
    for (_, type_), (_, stock_type) in zip(fused, stock, strict=True):
        assert type_ == ("Tensor" if output == "local" else stock_type)
    check_values([values for values, _ in (*fused, *stock)], theirs, true)


def with_fsdp(mesh):
    """Makes two pairs of ranks: a pair shares each sequence and splits the vocabulary, and FSDP2 runs over pairs."""
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    hidden, weight, target = problem()
    mine = slice(0, 2) if grid["data"].get_local_rank() == 0 else slice(2, 3)
    hidden, target = hidden[mine].requires_grad_(), target[mine]
    head = made("module", weight)
    parallelize_module(head, grid["tensor"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(head, mesh=grid["data"])
    loss = head(hidden, labels=target)
    (loss * factors(torch.zeros(()))).backward()
    return loss.detach(), hidden.grad, head.weight.grad.full_tensor()


def test_with_fsdp(four):
    hidden, weight, target = problem()
    expected = []
    for dtype in (torch.float32, torch.float64):
        parts = [loss_and_gradients(hidden[s], weight, target[s], dtype=dtype) for s in (slice(0, 2), slice(2, 3))]
        expected.append([[loss, d_hidden, (parts[0][2] + parts[1][2]) / 2] for loss, d_hidden, _ in parts])
    by_rank = four(with_fsdp)
    for pair, (theirs, true) in enumerate(zip(*expected)):
        check_values(by_rank[2 * pair : 2 * pair + 2], theirs, true)
