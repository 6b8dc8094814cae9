"""TRL's outputs by plain operations over whole logits, in the hidden states' dtype; float64 is the reference."""

import functools

import torch


def whole_logits(
    hidden, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=("entropy", "is_top1")
):
    logits = hidden @ weight.to(hidden.dtype).T
    if bias is not None:
        logits = logits + bias.to(hidden.dtype)
    return values_of(logits, targets, temperature, softcap, scale, outputs)


def values_of(logits, targets, temperature, softcap, scale, outputs):
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    values = {
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": logits.mean(-1).detach(),
        "is_top1": logits.argmax(-1) == targets,
    }
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    return (log_probs, *(values[name] if name in outputs else None for name in values))


def gradients(loss_of, model):
    """Returns the gradients of a loss by the parameters' names, in float64."""
    model.zero_grad(set_to_none=True)
    loss_of().backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def close(fused, stock, exact, unit):
    """Asserts an error of at most twice that of TRL's computation in the same precision, plus a unit of rounding."""
    fused, stock, exact = (tensor.detach().double() for tensor in (fused, stock, exact))
    error, naive, size = (torch.linalg.vector_norm(t) for t in (fused - exact, stock - exact, exact))
    return bool(error <= 2 * naive + unit * size)


class WholeLogits:
    """Replaces TRL's autograd function."""

    apply = staticmethod(whole_logits)


def of_whole_head(monkeypatch):
    """Makes fused heads compute whole logits: in a step by the head's own forward, with its adapters."""
    from logitless.trl import _log_probs, _step

    @functools.wraps(_log_probs.LogProbs.fused)
    def fused(self, options, hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        step = _step.current()
        head = (
            torch.nn.functional.linear
            if step is None
            else lambda hidden, *_: step.model.get_output_embeddings()(hidden)
        )
        return values_of(head(hidden, weight, bias), targets, temperature, softcap, scale, outputs)

    monkeypatch.setattr(_log_probs.LogProbs, "fused", fused)
