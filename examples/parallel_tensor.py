"""Tensor parallel: all ranks have the same sequences, and each a part of the vocabulary and of the layers between.

Run: torchrun --nproc-per-node 2 examples/parallel_tensor.py --text book.txt
     torchrun --nproc-per-node 2 examples/parallel_tensor.py --tiny     # this folder's code as text, on the CPU
"""

import parallel_model
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    options = parallel_model.options()
    parallel_model.start(options.device)
    torch.manual_seed(0)
    model = parallel_model.LanguageModel(options.width, options.layers).to(options.device)
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    plan = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    # The head returns a loss, which is the same on all ranks. Labels are given to it by name.
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)

    tokens = parallel_model.read(options.text, options.device)
    generator = torch.Generator().manual_seed(0)  # the same on all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if options.tiny else 3e-4, foreach=False)
    losses = []
    for _ in range(options.steps):
        loss = model(*parallel_model.batch(tokens, options.length, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
