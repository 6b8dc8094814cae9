"""logitless.nn.FusedHead on two gloo ranks: a unit of its own under FSDP2, and under DDP."""

import itertools
import os
import socket

import logitless.nn
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

pytestmark = [pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"), pytest.mark.slow]
VOCAB = 23  # odd: the ranks' shards differ


class Model(nn.Module):
    def __init__(self, fused, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.lm_head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)
        self.fused, self.reduction = fused, reduction
        if fused:
            self.lm_head = logitless.nn.FusedHead.from_linear(self.lm_head, reduction=reduction)

    def forward(self, ids, labels):
        hidden = torch.tanh(self.body(self.embed(ids)))
        if self.fused:
            return self.lm_head(hidden, labels).mean(), self.lm_head(hidden)
        logits = self.lm_head(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def wrapped(model, wrapper, mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if wrapper == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    keys, options = list(model.state_dict()), {"mesh": mesh}
    if wrapper == "FSDP2 mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.body, **options)
    fully_shard(model.lm_head, reshard_after_forward=wrapper != "FSDP2 kept", **options)
    fully_shard(model, **options)
    assert list(model.state_dict()) == keys
    return model


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def step(fused, wrapper, reduction, mesh, rank):
    """Loss, logits and gradients by name of a second step, which finds what the first has freed."""
    model = wrapped(Model(fused, reduction), wrapper, mesh)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        model.zero_grad()
        ids = torch.randint(0, VOCAB, (3, 5))
        loss, logits = model(ids, ids.roll(1, 1))
        loss.backward()
    gradients = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
    return loss.detach(), logits.detach(), gradients


def refusal_of_a_sharded_layer(mesh):
    from torch.distributed.fsdp import fully_shard

    linear = fully_shard(nn.Linear(8, VOCAB), mesh=mesh)
    try:
        logitless.nn.FusedHead.from_linear(linear)
    except (TypeError, ValueError) as error:
        return str(error)


CASES = list(itertools.product(["DDP", "FSDP2", "FSDP2 kept", "FSDP2 mixed"], ["mean", "none"]))


def rank_main(rank, port, file):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    found = {case: [step(fused, *case, mesh, rank) for fused in (False, True)] for case in CASES}
    found["refusal"] = refusal_of_a_sharded_layer(mesh)
    if rank == 0:
        torch.save(found, file)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path_factory.mktemp("ranks") / "found.pt"
    mp.spawn(rank_main, args=(port, file), nprocs=2)
    return torch.load(file)


@pytest.mark.parametrize("wrapper, reduction", CASES)
def test_gradients_are_those_of_a_linear_head(found, wrapper, reduction):
    stock, fused = found[wrapper, reduction]
    truth = found["FSDP2", reduction][0] if wrapper == "FSDP2 mixed" else stock
    unit = 2**-8 if wrapper == "FSDP2 mixed" else 2**-20
    torch.testing.assert_close(fused[1], stock[1])
    assert fused[2].keys() == stock[2].keys()
    values = [
        ("loss", fused[0], stock[0], truth[0]),
        *((name, fused[2][name], stock[2][name], truth[2][name]) for name in stock[2]),
    ]
    for name, ours, theirs, true in values:
        allowed = 2 * (theirs - true).abs().max() + unit * true.abs().max()
        assert (ours - true).abs().max() <= allowed, name


def test_a_layer_that_is_sharded_already_is_refused(found):
    assert found["refusal"].startswith("linear: expected")
