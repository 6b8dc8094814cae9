"""Trains with a list of ids for each token instead of the whole vocabulary, in three ways.

replay    a policy gradient over the ids that top-p sampling kept, so that ratios begin at exactly the sampler's
distill   a student learns a teacher's 100 likeliest tokens, with all others as one more class
drafter   a draft model learns the part of the vocabulary that occurs most

Run: python examples/candidate_sets.py --task replay
"""

import argparse

import logitless
import torch
from logitless.candidates import soft_cross_entropy

VOCAB, WIDTH, BATCH, LENGTH = 1000, 32, 16, 12
TEMPERATURE, TOP_P = 0.8, 0.9


class Model(torch.nn.Module):
    """Stands in for a language model: hidden states of each position, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.layer = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.lm_head = torch.nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed(tokens))[0]


@torch.no_grad()
def sample(model: Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples sequences. Returns tokens, their log-probabilities, and the ids kept for each: a list of any length."""
    tokens, log_probs, kept = torch.zeros(BATCH, 1, dtype=torch.int64), [], []
    for _ in range(LENGTH):
        logits = model.lm_head(model.hidden(tokens)[:, -1]) / TEMPERATURE
        order = logits.softmax(-1).sort(-1, descending=True)
        keep = order.values.cumsum(-1) - order.values < TOP_P
        log_p = torch.where(keep, order.values.log(), -torch.inf).log_softmax(-1)
        place = log_p.exp().multinomial(1)
        tokens = torch.cat([tokens, order.indices.gather(1, place)], 1)
        log_probs.append(log_p.gather(1, place))
        kept.append([ids[k] for ids, k in zip(order.indices, keep)])
    lists = [kept[s][row] for row in range(BATCH) for s in range(LENGTH)]  # row after row
    lengths = torch.tensor([len(ids) for ids in lists])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return tokens, torch.cat(log_probs, 1), torch.cat(lists), offsets


def replay(steps: int) -> str:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rewards, first_ratio = [], 1.0
    for step in range(steps):
        tokens, old, ids, offsets = sample(model)
        reward = (tokens[:, 1:] % 2 == 0).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        out = logitless.linear_candidates(
            model.hidden(tokens[:, :-1]),
            model.lm_head.weight,
            ids,
            offsets,
            targets=tokens[:, 1:],
            temperature=TEMPERATURE,
        )
        ratio = (out.target_log_probs - old).exp()
        loss = -torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward.mean().item())
        first_ratio = (ratio - 1).abs().max().item() if step == 0 else first_ratio
    return f"first ratios within {first_ratio:.1e} of 1; reward {rewards[0]:.2f} -> {sum(rewards[-5:]) / 5:.2f}"


def distill(steps: int) -> str:
    teacher, student = Model(), Model()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
        with torch.no_grad():  # usually read from a file
            probs, ids = (20 * teacher.lm_head(teacher.hidden(tokens))).softmax(-1).topk(100)
        out = logitless.linear_candidates(
            student.hidden(tokens), student.lm_head.weight, ids, normalize="vocabulary", max_workspace_bytes="256MiB"
        )
        loss = soft_cross_entropy(out.log_probs, probs, other=True).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}"


def drafter(steps: int) -> str:
    drafter, follows = Model(), torch.randint(0, VOCAB, (VOCAB,)) % 200
    frequent = torch.arange(200)  # the ids that a draft may propose
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
        targets = torch.where(torch.rand(tokens.shape) < 0.9, follows[tokens], torch.randint(0, VOCAB, tokens.shape))
        targets = torch.where(torch.isin(targets, frequent), targets, -100)
        out = logitless.linear_candidates(
            drafter.hidden(tokens), drafter.lm_head.weight, frequent, targets=targets, ignore_index=-100
        )
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}"


TASKS = {"replay": replay, "distill": distill, "drafter": drafter}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="replay")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(TASKS[options.task](options.steps))


if __name__ == "__main__":
    main()
