"""Layers of transformers, as Hugging Face's library runs them with PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from .config import Model
from .work import BF16, FP32, Batch, Pass, Work, eager_gated_mlp, eager_norm, linear, moved, residual, saved, total

BACKWARD_OF_ATTENTION = 2.5  # five products where the forward pass has two: Dao, arXiv:2307.08691, section 4.1


def _rope(tokens: int, elements: int) -> Work:
    """x cos + rotate_half(x) sin. Only cos and sin are kept; the backward pass also copies the transposed gradient."""
    return moved(tokens, elements, 4 + 2 + 4 + 4 + 6, 4 + 2 + 6 + 6 + 4 + 6 + 4)


def _attention(model: Model, batch: Batch, masked: bool) -> Work:
    """Attention keeps queries, keys, values, output and each row's log-sum-exp.

    It takes two products of L x L x head_dim. A causal kernel does half of their work. A kernel with a mask does all of
    it, keeps the mask in bf16, and repeats the keys of a group.
    """
    tokens, q, k = batch.tokens, model.heads * model.head_dim, model.kv_heads * model.head_dim
    repeated = masked and 1 < model.kv_heads < model.heads  # one key head is expanded without a copy
    kept = total(saved(tokens, 2 * q + 2 * (q if repeated else k)), saved(tokens, model.heads, FP32))
    flop = 4.0 * batch.length * tokens * q
    if masked:
        mask = Work(
            forward=Pass(masked=flop, traffic=3.0 * tokens * batch.length),
            backward=Pass(masked=BACKWARD_OF_ATTENTION * flop),
            saved=float(BF16) * tokens * batch.length,
        )
        return kept + mask
    work = Work(forward=Pass(attention=flop / 2), backward=Pass(attention=BACKWARD_OF_ATTENTION * flop / 2))
    return kept + work


def mixer(model: Model, batch: Batch, masked: bool) -> Work:
    tokens, hidden = batch.tokens, model.hidden
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = Work()
    if model.qk_norm:
        for heads in (model.heads, model.kv_heads):
            norms += eager_norm(tokens, model.head_dim, heads, model.gemma_norms)
    return total(
        eager_norm(tokens, hidden, gemma=model.gemma_norms),
        saved(tokens, hidden),
        linear(tokens, hidden, q, model.qkv_bias),
        linear(tokens, hidden, k, model.qkv_bias),
        linear(tokens, hidden, k, model.qkv_bias),
        moved(tokens, hidden, 0, 2 * 6),  # the sum of the input's three gradients
        norms,
        _rope(tokens, q + k),
        _attention(model, batch, masked),
        linear(tokens, q, hidden),
        eager_norm(tokens, hidden, gemma=True) if model.gemma_norms else Work(),  # after attention
        residual(tokens, hidden),
    )


def mlp(model: Model, batch: Batch) -> Work:
    tokens, hidden = batch.tokens, model.hidden
    norms = eager_norm(tokens, hidden, gemma=model.gemma_norms)
    if model.gemma_norms:
        norms += eager_norm(tokens, hidden, gemma=True)
    return total(norms, eager_gated_mlp(tokens, hidden, model.intermediate), residual(tokens, hidden))


def final_norm(model: Model, batch: Batch) -> Work:
    """The norm before the head, with its output, which the head keeps."""
    return eager_norm(batch.tokens, model.hidden, gemma=model.gemma_norms) + saved(batch.tokens, model.hidden)
