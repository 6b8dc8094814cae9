"""headroom.nn.FusedHead on two gloo ranks: a unit of its own under FSDP2, and under DDP."""

import os
import socket

import headroom.nn
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
VOCAB = 23  # odd: the ranks' shards differ


class Model(nn.Module):
    def __init__(self, fused, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.lm_head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)
        self.fused, self.reduction = fused, reduction
        if fused:
            self.lm_head = headroom.nn.FusedHead.from_linear(self.lm_head, reduction=reduction)

    def forward(self, ids, labels):
        hidden = torch.tanh(self.body(self.embed(ids)))
        if self.fused:
            return self.lm_head(hidden, labels).mean(), self.lm_head(hidden)
        logits = self.lm_head(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def shard_by_fsdp(model, kept, mixed):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": dist.init_device_mesh("cpu", (2,))}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.body, **options)
    fully_shard(model.lm_head, reshard_after_forward=not kept, **options)
    return fully_shard(model, **options)


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def rank_main(rank, port, wrapper, reduction, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = []
    for fused in (False, True):
        model = Model(fused, reduction)
        keys = list(model.state_dict())
        if wrapper == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            model = shard_by_fsdp(model, kept=wrapper == "FSDP2 kept", mixed=wrapper == "FSDP2 mixed")
            assert list(model.state_dict()) == keys
        torch.manual_seed(1 + rank)
        for _ in range(2):  # the second pass finds what the first has freed
            model.zero_grad()
            ids = torch.randint(0, VOCAB, (3, 5))
            loss, logits = model(ids, ids.roll(1, 1))
            loss.backward()
        gradients = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
        found.append((loss.detach(), logits.detach(), gradients))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", "FSDP2 kept", "FSDP2 mixed"])
def test_gradients_are_those_of_a_linear_head(wrapper, reduction, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(port, wrapper, reduction, tmp_path), nprocs=2)
    stock, fused = torch.load(tmp_path / "found.pt")
    tolerance = 2**-6 if wrapper == "FSDP2 mixed" else 1e-5  # of products in bfloat16
    assert abs(float(stock[0] - fused[0])) <= tolerance
    torch.testing.assert_close(fused[1], stock[1])
    assert fused[2].keys() == stock[2].keys()
    for name, gradient in stock[2].items():
        torch.testing.assert_close(fused[2][name], gradient, atol=tolerance, rtol=tolerance, msg=name)


def sharded_head(rank, port):
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=1)
    linear = fully_shard(nn.Linear(8, VOCAB), mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises((TypeError, ValueError), match="linear: expected"):
        headroom.nn.FusedHead.from_linear(linear)
    dist.destroy_process_group()


def test_a_head_that_is_sharded_already_is_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(sharded_head, args=(port,), nprocs=1)
