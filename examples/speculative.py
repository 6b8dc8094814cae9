"""Accepts tokens of a draft model so that all tokens have exactly the target model's probabilities, without logits.

A drafted token is kept with the probability min(1, p / q). After the first that is not, a token of the residual
distribution max(p - q, 0) follows: samples of p, of which the first that is kept with the probability 1 - q / p.

Run: python examples/speculative.py
"""

import argparse

import logitless
import torch

# Most passes of 64 samples, where p and q differ by rounding alone. That changes probabilities by less than 6e-6.
PASSES = 1000

Head = tuple[torch.Tensor, torch.Tensor]  # hidden states and the weight


@torch.no_grad()
def verify(drafted: torch.Tensor, target: Head, draft: Head, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Returns tokens [B, K + 1], and how many of each row count: the accepted ones and one more.

    drafted: Tokens [B, K], sampled from the draft's softmax at the temperature. target: hidden states [B, K + 1, D],
    before each drafted token and after the last. draft: hidden states [B, K, D], before each drafted token.
    """
    (hidden, weight), (draft_hidden, draft_weight) = target, draft
    length = drafted.shape[1]

    def log_probs(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logitless.linear_log_probs(hidden, weight, ids, temperature=temperature)

    ids = drafted[..., None]
    ratio = (log_probs(hidden[:, :-1], weight, ids) - log_probs(draft_hidden, draft_weight, ids))[..., 0].exp()
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(-1).sum(-1)
    tokens = torch.cat([drafted, drafted[:, :1]], -1)
    rows = torch.arange(len(drafted), device=drafted.device)
    for number in range(PASSES):
        if len(rows) == 0:
            break
        at = accepted[rows]
        out = logitless.sample(hidden[rows, at], weight, num_samples=64, temperature=temperature, return_logprobs=True)
        log_q = log_probs(draft_hidden[rows, at.clamp(max=length - 1)], draft_weight, out.ids)
        log_q[at == length] = -torch.inf  # nothing was drafted there, so that p itself is left
        left = -torch.expm1(log_q - out.log_probs)
        kept = ~(torch.rand_like(left) >= left)
        kept[:, -1] |= number == PASSES - 1
        found, place = kept.any(-1), kept.long().argmax(-1, keepdim=True)
        tokens[rows[found], at[found]] = out.ids.gather(-1, place)[found, 0]
        rows = rows[~found]
    return tokens, accepted + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4000, help="sequences")
    parser.add_argument("--drafted", type=int, default=4, help="tokens of the draft in each")
    options = parser.parse_args()
    # Stand-ins for models: hidden states depend on the last token alone.
    torch.manual_seed(0)
    vocab, width = 40, 16
    states, weight = torch.randn(vocab, width), torch.randn(vocab, width) / 4
    draft_weight = weight + 0.1 * torch.randn(vocab, width)
    tokens = torch.zeros(options.rows, 1, dtype=torch.int64)
    for _ in range(options.drafted):
        tokens = torch.cat([tokens, logitless.sample(states[tokens[:, -1]], draft_weight).ids], -1)
    hidden = states[tokens]
    verified, count = verify(tokens[:, 1:], (hidden, weight), (hidden[:, :-1], draft_weight))
    probs = (states[0] @ weight.T).softmax(-1)
    share = verified[:, 0].bincount(minlength=vocab) / options.rows
    print(
        f"{count.float().mean():.2f} tokens a pass, of at most {options.drafted + 1}; frequencies of the first are "
        f"within {(share - probs).abs().max():.3f} of the target's probabilities"
    )


if __name__ == "__main__":
    main()
