"""Layers of linear RNNs as flash-linear-attention 0.6.0 runs them in training: chunks of 64 tokens, fused norms.

Saved tensors are those of ``save_for_backward`` in ops/gla/chunk.py, ops/gated_delta_rule/chunk.py, ops/kda/chunk.py,
modules/norm and modules/activations of that version.
"""

from __future__ import annotations

from .config import Model
from .work import BF16, FP32, Batch, Pass, Work, linear, moved, residual, saved, total, transient

CHUNK = 64


def fused_norm(tokens: int, width: int) -> Work:
    """RMSNorm in one kernel, which keeps x and a number for each row."""
    return total(Work(parameters=width), saved(tokens, width), saved(tokens, 1, FP32), moved(tokens, width, 4, 6))


def _gated_norm(tokens: int, heads: int, width: int) -> Work:
    """norm(o) * act(g) in one kernel, which keeps o, g, a number for each head, and its output for the next product."""
    elements = heads * width
    return total(
        Work(parameters=width), saved(tokens, 3 * elements), saved(tokens, heads, FP32), moved(tokens, elements, 6, 10)
    )


def _convolutions(model: Model, tokens: int, channels: int) -> Work:
    """Short convolutions with SiLU, which keep their inputs."""
    if model.conv_size == 0:
        return Work()
    return total(Work(parameters=channels * model.conv_size), saved(tokens, channels), moved(tokens, channels, 4, 6))


def _recurrence(model: Model, tokens: int, products: int, matrices: int, vectors: int) -> Work:
    """Chunks of a recurrence whose state is head_dim x value_dim for each head.

    A chunk has ``products`` matrix products with the state, and as many with its own rows. The backward pass makes the
    forward pass's states again, and each product has two gradients (Yang et al., arXiv:2312.06635 and arXiv:2412.06464;
    the Kimi team, arXiv:2510.26692). Traffic of states is counted exactly. The bytes for each element of keys and
    values are estimates from the kernels' arguments.

    Args:
        model: The model.
        tokens: Tokens of the batch.
        products: Matrix products with the state.
        matrices: Bytes for each element of a chunk's state, of all forward and backward states that exist at once.
        vectors: Bytes for each element of keys that the backward pass holds.
    """
    heads, key, value = model.value_heads, model.head_dim, model.value_dim
    state = float(heads) * key * value / CHUNK  # elements for each token
    flop = 2.0 * tokens * heads * products * (key * value + CHUNK * (key + value) / 2)
    keys, values = tokens * heads * key, tokens * heads * value
    forward = tokens * state * 2 * BF16 + keys * 20.0 + values * 8.0
    backward = tokens * state * (matrices + 8) + keys * 70.0 + values * 16.0
    return Work(
        forward=Pass(attention=flop, traffic=forward),
        backward=Pass(attention=2.5 * flop, traffic=backward),
        transient=tokens * (state * matrices + heads * (key * vectors + value * 2 * BF16)),
    )


def _gla(model: Model, tokens: int, key: int, value: int) -> Work:
    """GLA, arXiv:2312.06635. Its gates take two products over 16 columns, a log-sigmoid and a division."""
    rank = 16
    return total(
        linear(tokens, model.hidden, rank),
        linear(tokens, rank, key, bias=True),
        saved(tokens, rank + 2 * key),
        moved(tokens, key, 4 + 4, 4 + 6),
        saved(tokens, 2 * key + value),
        saved(tokens, model.value_heads * CHUNK, FP32),  # a chunk's scores
        _recurrence(model, tokens, products=2, matrices=2 * FP32, vectors=5 * FP32 + BF16),
        linear(tokens, model.hidden, value),
        moved(tokens, model.hidden, 0, 4 * 6),  # the sum of the input's five gradients
    )


def _gated_delta(model: Model, tokens: int, key: int, value: int) -> Work:
    """Gated DeltaNet, arXiv:2412.06464.

    Queries, keys and values are one tensor in the convolution. Normalized queries and keys, values, and each chunk's
    solved triangle are kept.
    """
    hidden, heads = model.hidden, model.value_heads
    return total(
        linear(tokens, hidden, heads),
        linear(tokens, hidden, heads),
        Work(parameters=2 * heads),
        moved(tokens, 2 * key + value, 4, 4),  # queries, keys and values are joined
        saved(tokens, 2 * key + value + 3 * heads),
        saved(tokens, 2 * model.heads + heads, FP32),
        saved(tokens, heads * CHUNK),
        moved(tokens, 2 * key, 4, 6),  # queries and keys are normalized
        _recurrence(model, tokens, products=3, matrices=2 * BF16, vectors=5 * FP32),
        linear(tokens, hidden, value),
        moved(tokens, hidden, 0, 5 * 6),
    )


def _kda(model: Model, tokens: int, key: int, value: int) -> Work:
    """KDA, arXiv:2510.26692. Its gates cover all columns of keys, from two products; a chunk keeps two matrices."""
    hidden, heads, gates = model.hidden, model.value_heads, model.value_heads * model.head_dim
    return total(
        linear(tokens, hidden, model.value_dim),
        linear(tokens, model.value_dim, gates),
        linear(tokens, hidden, heads),
        Work(parameters=heads + gates),
        saved(tokens, model.value_dim + gates + 2 * heads),
        saved(tokens, 2 * key + value),
        saved(tokens, 2 * model.heads, FP32),
        saved(tokens, 2 * heads * CHUNK),
        moved(tokens, 2 * key, 4, 6),
        _recurrence(model, tokens, products=3, matrices=2 * BF16, vectors=7 * FP32),
        linear(tokens, hidden, model.value_dim),
        linear(tokens, model.value_dim, value, bias=True),
        saved(tokens, model.value_dim),
        moved(tokens, hidden, 0, 5 * 6),
    )


_GATES_AND_STATES = {"gla": _gla, "gated_deltanet": _gated_delta, "kda": _kda}


def mixer(model: Model, batch: Batch) -> Work:
    tokens, hidden = batch.tokens, model.hidden
    key, value = model.heads * model.head_dim, model.value_heads * model.value_dim
    return total(
        fused_norm(tokens, hidden),
        saved(tokens, hidden),
        linear(tokens, hidden, key),
        linear(tokens, hidden, key),
        linear(tokens, hidden, value),
        _convolutions(model, tokens, 2 * key + value),
        _GATES_AND_STATES[model.mixer](model, tokens, key, value),
        _gated_norm(tokens, model.value_heads, model.value_dim),
        linear(tokens, value, hidden),
    )


def mlp(model: Model, batch: Batch) -> Work:
    """SwiGLU in one function with the last product: gate and up are kept, their product is made again."""
    tokens, hidden, width = batch.tokens, model.hidden, model.intermediate
    return total(
        fused_norm(tokens, hidden),  # this kernel also adds the residual
        moved(tokens, hidden, 4, 2),
        saved(tokens, hidden + 2 * width),
        linear(tokens, hidden, width),
        linear(tokens, hidden, width),
        linear(tokens, width, hidden),
        moved(tokens, width, 6, 12),
        moved(tokens, hidden, 0, 6),
        residual(tokens, hidden),
        transient(tokens, 4 * BF16 * width),
    )


def final_norm(model: Model, batch: Batch) -> Work:
    return fused_norm(batch.tokens, model.hidden) + saved(batch.tokens, model.hidden)
