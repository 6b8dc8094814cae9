"""What a page's Python blocks find there when they begin: small tensors and models in the place of a reader's own."""

from __future__ import annotations

import types
from typing import Any

import logitless
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
    """A tiny model of transformers, with a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    where["model"] = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **sizes))
    where["batch"] = torch.randint(99, (2, 8))


def with_head(where: Place) -> None:
    where["model"] = nn.Module()
    where["model"].lm_head = nn.Linear(256, 32_000, bias=False)


def with_criterion(where: Place) -> None:
    where["model"] = types.SimpleNamespace(config=types.SimpleNamespace(), criterion=None)


def of_policy(where: Place) -> None:
    where |= {"logitless": logitless, "old_log_probs": -torch.rand(2, 6), "advantages": torch.randn(2, 6)}


def loss_alone(where: Place) -> None:
    where |= {"logitless": logitless, "weight": where["lm_head"].weight}


def of_one_rank(where: Place) -> None:
    """A group of this process alone, which has the whole head."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    where |= {"weight": where["lm_head"].weight, "target": where["labels"]}
    where["tp_group"] = torch.distributed.group.WORLD


def of_readme(where: Place) -> None:
    language_model(where)
    of_one_rank(where)


def of_parallel_clients(where: Place) -> None:
    from logitless.nn import FusedHead
    from torch.distributed.device_mesh import init_device_mesh

    of_one_rank(where)
    with_head(where)
    loss_alone(where)
    where["model"].lm_head = FusedHead.from_linear(where["model"].lm_head)
    where |= {"mesh": init_device_mesh("cpu", (1,)), "cp_group": where["tp_group"], "items": 12}


def of_two_heads(where: Place) -> None:
    where |= {"student_hidden": where["hidden"], "teacher_hidden": torch.randn(2, 6, 384)}
    where |= {"student_head": nn.Linear(256, 5_000, bias=False), "teacher_head": nn.Linear(384, 5_000, bias=False)}
    where["completion_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)


PAGES = {
    "README.md": of_readme,
    "docs/compat.md": with_criterion,
    "docs/divergence.md": of_two_heads,
    "docs/fla.md": with_criterion,
    "docs/fused_head.md": with_head,
    "docs/parallel.md": of_one_rank,
    "docs/parallel_clients.md": of_parallel_clients,
    "docs/peft.md": language_model,
    "docs/reinforcement_learning.md": of_policy,
    "docs/sparsification.md": loss_alone,
    "docs/transformers.md": language_model,
}


def of_page(page: str) -> Place:
    where = tensors()
    if page in PAGES:
        PAGES[page](where)
    return where
