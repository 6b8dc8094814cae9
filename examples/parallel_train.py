"""Trains a small language model of bytes on several ranks. Its head computes the loss, sharded in one of two ways.

fsdp2: each rank has its own sequences and a part of each parameter; the head is a unit like the others. tensor: all
ranks have the same sequences; each has a part of the vocabulary and of the layers between.

Run: torchrun --nproc-per-node 2 examples/parallel_train.py fsdp2 --text book.txt
     torchrun --nproc-per-node 2 examples/parallel_train.py tensor --tiny     # this file as text, on the CPU

The last lines show the time and memory of a step on rank 0 with and without logitless. A vocabulary of 256 bytes is
small, so the difference is small.
"""

import argparse
import functools
import os

import logitless.nn
import tiny_model
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

VOCAB = 256
HEADS = ("logitless", "whole logits")


class LanguageModel(nn.Module):
    """A causal transformer. Forward takes ids and labels [B, T] and returns a loss.

    The loss is the head's own, or for a comparison PyTorch's over whole logits.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        block = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, **block) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = logitless.nn.FusedHead(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, fused: bool = True) -> Tensor:
        hidden = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        if fused:
            return self.lm_head(self.norm(hidden), labels=labels)
        return cross_entropy(self.lm_head(self.norm(hidden)).flatten(0, 1), labels.flatten())


def shard_fsdp2(model: LanguageModel) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.lm_head])  # the head may also be a unit alone, or belong to the model's own unit
    fully_shard(model)


def shard_tensor(model: LanguageModel, device: str) -> None:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    plan = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    # The head returns a loss that is the same on all ranks. Pass labels to it by name.
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["fsdp2", "tensor"])
    parser.add_argument("--text", default=__file__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="a narrow model, on the CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    width, layers, length = (32, 1, 32) if options.tiny else (512, 8, 512)

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():  # torchrun describes the group
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = LanguageModel(width, layers).to(device)
    if options.how == "fsdp2":
        shard_fsdp2(model)
    else:
        shard_tensor(model, device)

    with open(options.text, "rb") as source:
        tokens = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long().to(device)
    # Each rank draws its own sequences under fsdp2. All ranks draw the same under tensor.
    generator = torch.Generator().manual_seed(dist.get_rank() if options.how == "fsdp2" else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if options.tiny else 3e-4, foreach=False)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(tokens) - length - 1, (8,), generator=generator).tolist()
        rows = torch.stack([tokens[first : first + length + 1] for first in starts])
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    def step(fused: bool) -> None:
        model(rows[:, :-1], rows[:, 1:], fused).backward()

    table = tiny_model.compare({name: functools.partial(step, name == "logitless") for name in HEADS}, device)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(table)


if __name__ == "__main__":
    main()
