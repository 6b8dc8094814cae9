"""What a page's Python blocks find there when they begin: small tensors and models in the place of a reader's own."""

from __future__ import annotations

import types

import torch
from torch import nn


def tensors() -> dict[str, object]:
    torch.manual_seed(0)
    return {
        "torch": torch,
        "F": torch.nn.functional,
        "hidden": torch.randn(2, 6, 256, requires_grad=True),
        "lm_head": nn.Linear(256, 32_000, bias=False),
        "labels": torch.randint(32_000, (2, 6)),
    }


def language_model(where: dict[str, object]) -> None:
    """A tiny model of transformers, with a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    where["model"] = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **sizes))
    where["batch"] = torch.randint(99, (2, 8))


def with_head(where: dict[str, object]) -> None:
    where["model"] = nn.Module()
    where["model"].lm_head = nn.Linear(256, 32_000, bias=False)  # type: ignore[attr-defined]


def with_criterion(where: dict[str, object]) -> None:
    where["model"] = types.SimpleNamespace(config=types.SimpleNamespace(), criterion=None)


def of_policy(where: dict[str, object]) -> None:
    import headroom

    where["headroom"] = headroom
    where["old_log_probs"], where["advantages"] = -torch.rand(2, 6), torch.randn(2, 6)


def loss_alone(where: dict[str, object]) -> None:
    import headroom

    where |= {"headroom": headroom, "weight": where["lm_head"].weight}  # type: ignore[attr-defined]


def of_one_rank(where: dict[str, object]) -> None:
    """A group of this process alone, which has the whole head."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    where |= {"weight_shard": where["lm_head"].weight, "target": where["labels"]}  # type: ignore[attr-defined]
    where["tp_group"] = torch.distributed.group.WORLD


PAGES = {
    "README.md": language_model,
    "docs/compat.md": with_criterion,
    "docs/fla.md": with_criterion,
    "docs/fused_head.md": with_head,
    "docs/parallel.md": of_one_rank,
    "docs/peft.md": language_model,
    "docs/reinforcement_learning.md": of_policy,
    "docs/thinning.md": loss_alone,
    "docs/transformers.md": language_model,
}


def of_page(page: str) -> dict[str, object]:
    where = tensors()
    if page in PAGES:
        PAGES[page](where)
    return where
