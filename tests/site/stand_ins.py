"""Small tensors and models that a page's Python blocks find in place of a reader's own."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

Place = dict[str, Any]


def tensors() -> Place:
    torch.manual_seed(0)
    return {
        "torch": torch,
        "F": torch.nn.functional,
        "hidden": torch.randn(2, 6, 256, requires_grad=True),
        "lm_head": nn.Linear(256, 32_000, bias=False),
        "labels": torch.randint(32_000, (2, 6)),
    }


def language_model(where: Place) -> None:
    """Makes a tiny model of transformers with a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    where["model"] = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **sizes))
    where["batch"] = torch.randint(99, (2, 8))


def with_criterion(where: Place) -> None:
    where["model"] = types.SimpleNamespace(config=types.SimpleNamespace(), criterion=None)


def of_one_rank(where: Place) -> None:
    """Makes a group of this process alone, which has the whole head."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    where |= {"weight": where["lm_head"].weight, "target": where["labels"]}
    where["tp_group"] = torch.distributed.group.WORLD


def of_readme(where: Place) -> None:
    language_model(where)
    of_one_rank(where)


PAGES = {
    "README.md": of_readme,
    "docs/distributed.md": of_one_rank,
    "docs/hub.md": language_model,
    "docs/pytorch.md": with_criterion,
    "docs/retrieval.md": of_one_rank,
}


def of_page(page: str) -> Place:
    where = tensors()
    if page in PAGES:
        PAGES[page](where)
    return where
