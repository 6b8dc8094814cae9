"""FSDP2 on two gloo ranks: the head in the root module, in one of its own that is kept, and in one that is freed."""

import os

import headroom.transformers
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from compare import Reference, Step, step
from tiny import build, inputs


def batch_of(rank, model):
    batch = inputs(model)
    batch["labels"] = batch["labels"].roll(rank, 0)
    return batch


def mean(steps):
    """What rank 0 sees: its own loss, and the mean of the gradients."""
    return Step(
        steps[0].loss, {name: sum(s.gradients[name] for s in steps) / len(steps) for name in steps[0].gradients}
    )


def rank_main(rank, port, head, results):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    found = []
    for fused in (False, True):
        model = build(transformers.LlamaForCausalLM)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if head != "root":
            fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=head == "freed")
        fully_shard(model, mesh=mesh)
        if fused:
            headroom.transformers.patch(model)
        try:
            loss, gradients, _ = step(model, batch_of(rank, model))
            found.append(Step(loss, {name: gradient.full_tensor() for name, gradient in gradients.items()}))
        except NotImplementedError as error:
            found.append(str(error))
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("head", ["root", "kept", "freed"])
def test_fully_shard(head, tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = tmp_path / "results.pt"
    mp.spawn(rank_main, args=(port, head, results), nprocs=2)
    stock, fused = torch.load(results, weights_only=False)
    if head == "freed":
        assert isinstance(fused, str) and "was freed before the loss" in fused
        return
    model = build(transformers.LlamaForCausalLM)
    alone = [Reference.of(model, batch_of(rank, model)) for rank in range(2)]
    exact, *rounded = (mean(steps) for steps in zip(*([r.exact, *r.rounded] for r in alone), strict=True))
    reference = Reference(stock, exact, tuple(rounded))
    assert reference.share(fused) <= 1
    assert not reference.unseen(torch.float32)
