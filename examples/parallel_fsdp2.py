"""FSDP2: every rank has sequences of its own and a part of each parameter; the head is a unit like the others.

Run: torchrun --nproc-per-node 2 examples/parallel_fsdp2.py --text book.txt
     torchrun --nproc-per-node 2 examples/parallel_fsdp2.py --tiny     # this folder's code as text, on the CPU
"""

import parallel_model
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def main() -> None:
    options = parallel_model.options()
    parallel_model.start(options.device)
    torch.manual_seed(0)
    model = parallel_model.LanguageModel(options.width, options.layers).to(options.device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.lm_head])  # or the head alone, or neither: then it belongs to the model's own unit
    fully_shard(model)

    tokens = parallel_model.read(options.text, options.device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if options.tiny else 3e-4)
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
