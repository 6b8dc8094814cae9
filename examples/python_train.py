"""A language model's head in PyTorch: the same losses and gradients as F.cross_entropy over whole logits.

Run: python examples/python_train.py
"""

import logitless
import torch
import torch.nn.functional as F

TOKENS, VOCABULARY, HIDDEN = 64, 2000, 48


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.body = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(tokens))[0]


def fused(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Position s predicts token s + 1; the head is the embedding, the workspace at most 16 MiB."""
    return logitless.linear_cross_entropy(
        model.hidden(tokens), model.embedding.weight, tokens, shift=1, max_workspace_bytes=16 << 20
    )


def materialised(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    logits = F.linear(model.hidden(tokens)[:, :-1], model.embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(loss_of, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, VOCABULARY, (4, TOKENS))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    ours, theirs = train(fused), train(materialised)
    for step in range(0, len(ours), 5):
        print(f"step {step:2}: loss {ours[step]:.4f} (whole logits {theirs[step]:.4f})")
    difference = max(abs(a - b) for a, b in zip(ours, theirs))
    print(f"largest difference {difference:.1e}; plan: {logitless.plan(4 * TOKENS, VOCABULARY, HIDDEN)}")
    assert ours[-1] < ours[0] and difference < 1e-2

    out = logitless.linear_cross_entropy(
        torch.randn(8, HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.randint(0, VOCABULARY, (8,)), return_stats=True
    )
    print(f"log-probabilities {(-out.nll).tolist()}\nentropies {out.entropy.tolist()}")


if __name__ == "__main__":
    main()
