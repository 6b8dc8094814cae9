"""Runs a policy gradient in a loop of your own, with the functions of verl, prime-rl or OpenRLHF. One import changes.

Run: python examples/policy_gradient.py --model Qwen/Qwen3-0.6B --client verl
     python examples/policy_gradient.py --tiny     # a random model, on the CPU

The last lines show the time and memory of a step, without sampling, with and without logitless. With --tiny the
vocabulary of 258 entries is too small to show a difference.
"""

import functools
import tempfile

import logitless.compat.openrlhf
import logitless.compat.prime_rl
import logitless.compat.verl
import tiny_model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPERATURE = 0.9


def verl(hidden, head, labels):
    """Replaces verl.utils.kernel.linear_cross_entropy."""
    log_probs, entropy = logitless.compat.verl.linear_cross_entropy(hidden, head.weight, labels, TEMPERATURE)
    return log_probs.view(labels.shape), entropy.view(labels.shape)


def prime_rl(hidden, head, labels):
    """Uses the module by which prime-rl replaces lm_head."""
    fused = logitless.compat.prime_rl.FusedOutputLinear(head.in_features, head.out_features)
    fused.weight = head.weight
    out = fused(hidden, labels, temperature=torch.full(labels.shape, TEMPERATURE, device=hidden.device))
    return out["logprobs"], out["entropy"]


def openrlhf(hidden, head, labels):
    """Replaces log_probs_from_logits and compute_entropy, which take logits."""
    return logitless.compat.openrlhf.log_probs_and_entropy_from_hidden(hidden, head.weight, labels, TEMPERATURE)


def whole_logits(hidden, head, labels):
    """Makes all logits, for the comparison."""
    log_probs = (head(hidden).float() / TEMPERATURE).log_softmax(-1)
    return log_probs.gather(-1, labels[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


CLIENTS = {"verl": verl, "prime_rl": prime_rl, "openrlhf": openrlhf}


def rewards(completions: list[str]) -> torch.Tensor:
    """Counts the letters of each completion."""
    return torch.tensor([float(sum(each.isalpha() for each in text)) for text in completions])


def main() -> None:
    parser = tiny_model.parser(steps=50)
    parser.add_argument("--client", choices=list(CLIENTS), default="verl")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        name = tiny_model.save(folder) if options.tiny else options.model
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name).to(device)
    prompt = tokenizer(["Letters, please: "] * (8 if options.tiny else 16), return_tensors="pt").to(device)
    start = prompt["input_ids"].shape[1]
    length = 12 if options.tiny else 128
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if options.tiny else 1e-6)
    took = []

    def backward(head, sampled, advantage):
        hidden = model.model(sampled[:, :-1]).last_hidden_state[:, start - 1 :]
        log_probs, entropy = head(hidden, model.lm_head, sampled[:, start:])
        loss = -(advantage[:, None] * log_probs).mean() - 1e-3 * entropy.mean()
        loss.backward()
        return log_probs, entropy

    for _ in range(options.steps):
        sampled = model.generate(
            **prompt,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=tokenizer.pad_token_id,
        )
        reward = rewards(tokenizer.batch_decode(sampled[:, start:], skip_special_tokens=True)).to(device)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        optimizer.zero_grad()
        log_probs, entropy = backward(CLIENTS[options.client], sampled, advantage)
        optimizer.step()
        took.append((reward.mean().item(), entropy.mean().item(), log_probs.detach().mean().item()))
    first, last = took[0], took[-1]
    print(f"reward {first[0]:.2f} -> {last[0]:.2f}, entropy {last[1]:.2f}, first log-probability {first[2]:.5f}")
    heads = {"logitless": CLIENTS[options.client], "whole logits": whole_logits}
    steps = {name: functools.partial(backward, head, sampled, advantage) for name, head in heads.items()}
    print(tiny_model.compare(steps, device))


if __name__ == "__main__":
    main()
