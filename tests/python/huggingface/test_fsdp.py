"""FSDP2 on two gloo ranks: the head in the root module, in one of its own that is kept, and in one that is freed."""

import os

import headroom.transformers
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compare import step
from tiny import build, inputs


def rank_main(rank, port, head, results):
    import transformers
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
        batch = inputs(model)
        batch["labels"] = batch["labels"].roll(rank, 0)
        try:
            loss, gradients, _ = step(model, batch)
            found.append((loss, {name: gradient.full_tensor() for name, gradient in gradients.items()}))
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
    stock, fused = torch.load(results)
    if head == "freed":
        assert isinstance(fused, str) and "was freed before the loss" in fused
        return
    assert abs(float(stock[0] - fused[0])) <= 1e-5
    assert stock[1].keys() == fused[1].keys()
    for name, gradient in stock[1].items():
        torch.testing.assert_close(fused[1][name], gradient, atol=1e-5, rtol=1e-5, msg=name)
