"""A small language model wrapped in each way, and its training step with the stock head and the fused one."""

import contextlib
import copy

import logitless
import logitless.nn
import torch
import torch.nn.functional as F
from torch import nn

VOCAB, D = 23, 8  # an odd vocabulary gives the ranks different shards


class Model(nn.Module):
    """A model whose ``head`` says how the loss is computed.

    stock     F.cross_entropy of lm_head(hidden)
    inside    logitless.linear_cross_entropy of lm_head.weight, within the model's forward
    outside   the same of the hidden states that the model returns
    unshard   inside, after lm_head.unshard()
    module    logitless.nn.FusedHead in the place of lm_head ("module with logits": which are made after the loss)
    """

    def __init__(self, head, reduction="mean", tied=False, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(VOCAB, D), nn.Linear(D, D)
        self.norm, self.lm_head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=bias)
        self.head, self.reduction = head, reduction
        if tied:
            self.lm_head.weight = self.embed.weight
        if head.startswith("module"):
            self.lm_head = logitless.nn.FusedHead.from_linear(self.lm_head, reduction=reduction)

    def forward(self, ids, labels):
        hidden = self.norm(torch.tanh(self.body(self.embed(ids))))
        return hidden if self.head == "outside" else self.loss(hidden, labels)

    def loss(self, hidden, labels):
        if self.head == "module":
            return self.lm_head(hidden, labels)
        if self.head == "module with logits":
            loss, logits = self.lm_head(hidden, labels), self.lm_head(hidden)
            of_logits = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
            torch.testing.assert_close(of_logits.detach().flatten(), loss.detach().flatten())
            return loss
        if self.head == "stock":
            logits = self.lm_head(hidden).flatten(0, 1)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(logits, labels.flatten(), reduction=self.reduction)
            return loss.reshape(labels.shape) if self.reduction == "none" else loss
        if self.head == "unshard":
            self.lm_head.unshard()
        return logitless.linear_cross_entropy(
            hidden, self.lm_head.weight, labels, bias=self.lm_head.bias, reduction=self.reduction
        )


def batch(rank, step):
    torch.manual_seed(10 * step + rank + 1)
    ids = torch.randint(0, VOCAB, (3, 5))
    labels = ids.roll(1, 1)
    labels[0, : 2 * rank] = -100  # ranks have different counts of valid rows
    return ids, labels


def train(wrapped, model, rank, steps=2, micro=1, sync=lambda on: None):
    """Returns the losses of the last step, and the gradients of its parameters by name, reduced and whole."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        wrapped.zero_grad()
        losses = []
        for part in range(micro):
            with sync(part == micro - 1) or contextlib.nullcontext():
                ids, labels = batch(rank, micro * step + part)
                out = wrapped(ids, labels)
                loss = model.loss(out, labels) if model.head == "outside" else out
                loss.mean().backward()
                losses.append(loss.detach().float())
        if step < steps - 1:
            optimizer.step()
    gradients = {}
    for name, parameter in wrapped.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        gradients[name.removeprefix("module.")] = None if whole is None else whole.detach().clone()
    return torch.stack([loss.mean() for loss in losses]), gradients


def alone(world, steps=2, micro=1, dtype=torch.float64, divisor=None, **options):
    """Returns the gradients of one process with the batches of all ranks."""
    model = Model("stock", **options).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model.zero_grad()
        for rank in range(world):
            for part in range(micro):
                (model(*batch(rank, micro * step + part)).mean() / (divisor or world)).backward()
        if step < steps - 1:
            optimizer.step()
    return {name: copy.deepcopy(parameter.grad) for name, parameter in model.named_parameters()}
