"""Trains a tiny language model in JAX, with flax and optax, twice: with logits in memory, and with logitless.

The text is a repeated sentence, which the model learns. Both heads start from the same parameters.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from logitless.jax import linear_cross_entropy

TEXT = "the head of a language model needs no logits in memory to learn this sentence. "


class Model(nnx.Module):
    """A recurrent model over bytes whose head is its embedding."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs))
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns hidden states, from which the loss makes no logits."""
        return self.norm(self.rnn(self.embed(tokens)))


def materialized(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, targets).mean()


def logitless(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    return linear_cross_entropy(hidden, weight, targets, max_workspace_bytes="64MiB")


def train(head, args: argparse.Namespace) -> tuple[list[float], float]:
    """Returns the loss of each step, and the seconds of one after the first."""
    model = Model(args.vocab, args.width, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        def loss(model: Model) -> jax.Array:
            return head(model(tokens[:, :-1]), model.embed.embedding[...], tokens[:, 1:])

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    text = np.frombuffer((TEXT * 100).encode(), np.uint8).astype(np.int32)
    rng, losses, start = np.random.default_rng(0), [], 0.0
    for index in range(args.steps):
        places = rng.integers(0, len(text) - args.length - 1, args.batch)
        batch = jnp.asarray(np.stack([text[place : place + args.length + 1] for place in places]))
        losses.append(float(step(model, optimizer, batch)))
        start = time.perf_counter() if index == 0 else start
    return losses, (time.perf_counter() - start) / max(args.steps - 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--width", type=int, default=64, help="width of the hidden states")
    parser.add_argument("--vocab", type=int, default=4096, help="entries of the vocabulary; bytes use the first 256")
    args = parser.parse_args()
    for head in (materialized, logitless):
        losses, seconds = train(head, args)
        print(f"{head.__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {1000 * seconds:.0f} ms a step")


if __name__ == "__main__":
    main()
