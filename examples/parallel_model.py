"""What the examples of several ranks share: a small language model of bytes, and the text that it is trained on."""

import argparse
import os

import logitless.nn
import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCAB = 256


class LanguageModel(nn.Module):
    """A causal transformer whose head computes its loss: forward takes ids and labels [B, T]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        block = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, **block) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = logitless.nn.FusedHead(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.lm_head(self.norm(hidden), labels=labels)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default=__file__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="a narrow model, on the CPU")
    found = parser.parse_args()
    found.device = "cuda" if torch.cuda.is_available() and not found.tiny else "cpu"
    found.width, found.layers, found.length = (32, 1, 32) if found.tiny else (512, 8, 512)
    return found


def start(device: str) -> None:
    """Joins the group that torchrun describes, unless this process is in one."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")


def batch(tokens: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(tokens) - length - 1, (8,), generator=generator).tolist()
    rows = torch.stack([tokens[first : first + length + 1] for first in starts])
    return rows[:, :-1], rows[:, 1:]


def read(path: str, device: str) -> Tensor:
    with open(path, "rb") as source:
        return torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long().to(device)
