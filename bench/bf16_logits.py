"""Measures the loss of accuracy from logits rounded to bfloat16. Logitless never rounds logits.

Hidden states and weights are bfloat16 in both; float64 products of these are the reference. The program prints the
share of rows whose largest logit changes (a different greedy token), and errors of the targets' log-probabilities.

    python bench/bf16_logits.py
"""

import argparse

import logitless
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--deviation", type=float, default=4, help="standard deviation of the logits")
    parser.add_argument("--most", type=float, default=40, help="the largest |logit|: rows beyond it are scaled down")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(options.vocab, options.hidden, generator=generator, dtype=torch.float64)
    weight = (weight * options.deviation / options.hidden**0.5).bfloat16()
    largest = (hidden @ weight.double().T).abs().amax(1, keepdim=True)
    hidden = (hidden * (options.most / largest).clamp(max=1)).bfloat16()

    truth = hidden.double() @ weight.double().T
    greedy = truth.argmax(1)
    # Targets are sampled from the model, so they are likely tokens.
    target = torch.multinomial(truth.softmax(1), 1, generator=generator)
    of_truth = truth.log_softmax(1).gather(1, target)

    rounded = truth.float().bfloat16()
    of_rounded = rounded.double().log_softmax(1).gather(1, target)
    result = logitless.linear_cross_entropy(hidden, weight, target[:, 0], return_stats=["nll", "argmax"])
    assert result.nll is not None and result.argmax is not None
    rows = {
        "logits in bfloat16": (rounded.argmax(1), of_rounded),
        "logitless": (result.argmax, -result.nll.double()[:, None]),
    }
    print(f"{options.tokens} tokens, vocabulary {options.vocab}, largest |logit| {truth.abs().max():.1f}")
    for name, (argmax, log_p) in rows.items():
        error = (log_p - of_truth).abs()
        changed = (argmax != greedy).double().mean()
        off = f"{error.mean():.1e}, at most {error.max():.1e}"
        print(f"{name}: {changed:.2%} of greedy tokens change, log p is off by {off}")


if __name__ == "__main__":
    main()
