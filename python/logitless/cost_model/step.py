"""Predicts FLOP, memory and time of one training step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..errors import BudgetTooSmallError, UnsupportedError
from . import linear_rnn, transformer
from .config import Model
from .devices import ATTENTION_SHARE, BANDWIDTH_SHARE, LAYERS_FACTOR, MASKED_SHARE, Device, find_device, product_rate
from .heads import Head, HeadCost, head_cost
from .work import BF16, Batch, Pass, Work

# Bytes for each parameter: an optimizer's states, and the bytes that its step reads and writes.
OPTIMIZERS = {
    "adamw": (2 * 2, 4 * 2 + 3 * 2),  # states have the weights' dtype, bf16, as in PyTorch's AdamW
    "adamw-fp32": (2 * 4, 2 * 2 + 2 * 4 + 2 + 2 * 4),  # both moments are float32
    "adamw-fp32-master": (3 * 4, 2 + 3 * 4 + 2 + 3 * 4),  # moments and a copy of the weights are float32
    "sgd": (0, 3 * 2),
    "sgd-momentum": (2, 5 * 2),
}
# Bytes beyond weights and states when a step begins: PyTorch's workspaces of cuBLAS, tokens and tables. In
# bench/records/steps-2026-11-23.json these are 65 to 119 MiB.
LIBRARIES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Step:
    """The prediction of one step; nothing of it is measured.

    Attributes:
        parameters: The model's parameters.
        model_flop: Three times the forward pass's FLOP, including attention, without those that checkpointing repeats.
        head_flop_share: The share of the head's three matmuls in model_flop.
        weight_bytes: Bytes of the weights, in bf16.
        optimizer_bytes: Bytes of the optimizer's states.
        saved_bytes: Bytes of activations that are saved when the head begins.
        head_bytes: The most bytes that the head holds beyond these.
        peak_bytes: The most bytes that are allocated.
        peak_at: Where the peak is: ``head``, ``layers`` (the last layer's backward pass) or ``gradients`` (when all
            gradients exist).
        layers_seconds: Time of everything but head and optimizer.
        optimizer_seconds: Time of the optimizer.
        head_seconds: Time of the head.
        head: The cost of the head.
    """

    parameters: int
    model_flop: float
    head_flop_share: float
    weight_bytes: float
    optimizer_bytes: float
    saved_bytes: float
    head_bytes: float
    peak_bytes: float
    peak_at: str
    layers_seconds: float
    optimizer_seconds: float
    head_seconds: float
    head: HeadCost

    @property
    def seconds(self) -> float:
        return self.layers_seconds + self.optimizer_seconds + self.head_seconds

    @property
    def head_time_share(self) -> float:
        return self.head_seconds / self.seconds

    @property
    def head_memory_share(self) -> float:
        """The head's share of the memory at its own peak."""
        return self.head_bytes / (self.weight_bytes + self.optimizer_bytes + self.saved_bytes + self.head_bytes)


@dataclasses.dataclass(frozen=True)
class _Layer:
    mixer: Work
    mlp: Work

    @property
    def whole(self) -> Work:
        return self.mixer + self.mlp


@dataclasses.dataclass(frozen=True)
class _Layers:
    """Layers in order: ``masked`` sliding ones, then the full ones. They are no list, as there may be 10^9 of them."""

    sliding: _Layer
    masked: int
    full: _Layer
    count: int
    norm: Work  # the norm after the last layer

    def saved(self, first: int, stop: int) -> float:
        """Returns the bytes that layers first to stop - 1 save."""
        masked = max(min(stop, self.masked) - first, 0)
        return masked * self.sliding.whole.saved + (stop - first - masked) * self.full.whole.saved

    def each(self) -> tuple[tuple[int, _Layer], ...]:
        return (self.masked, self.sliding), (self.count - self.masked, self.full)

    @property
    def last(self) -> _Layer:
        return self.sliding if self.masked == self.count else self.full


def _layers(model: Model, batch: Batch) -> _Layers:
    """Returns the model's layers, those with a mask first."""
    if model.mixer != "attention":
        layer = _Layer(linear_rnn.mixer(model, batch), linear_rnn.mlp(model, batch))
        return _Layers(layer, 0, layer, model.layers, linear_rnn.final_norm(model, batch))
    # transformers leaves the mask out where the window covers the whole sequence.
    masked = model.sliding_layers if batch.length >= model.window else 0
    mlp = transformer.mlp(model, batch)
    full = _Layer(transformer.mixer(model, batch, masked=False), mlp)
    sliding = _Layer(transformer.mixer(model, batch, masked=True), mlp) if masked else full
    return _Layers(sliding, masked, full, model.layers, transformer.final_norm(model, batch))


def parameters(model: Model) -> int:
    """Returns the number of parameters; those of a tied head count once."""
    layers = _layers(model, Batch(1, 1))
    embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
    return embeddings + layers.norm.parameters + sum(n * layer.whole.parameters for n, layer in layers.each())


def _pass_seconds(work: Pass, device: Device) -> float:
    seconds = work.products / product_rate(device.name)
    seconds += work.attention / (ATTENTION_SHARE * device.peak_flops)
    seconds += work.masked / (MASKED_SHARE * device.peak_flops)
    return LAYERS_FACTOR * (seconds + work.traffic / (BANDWIDTH_SHARE * device.peak_bandwidth))


def _layers_seconds(layers: _Layers, checkpoint: int, device: Device) -> float:
    repeated = 2 if checkpoint else 1
    work = layers.norm.forward + layers.norm.backward
    for count, layer in layers.each():
        work += (layer.whole.forward.times(repeated) + layer.whole.backward).times(count)
    return _pass_seconds(work, device)


def _saved(layers: _Layers, batch: Batch, model: Model, checkpoint: int) -> tuple[float, float]:
    """Returns the bytes that all layers keep when the head begins, and those that a segment's backward pass remakes."""
    if checkpoint == 0:
        return layers.saved(0, layers.count), 0.0
    segments = math.ceil(layers.count / checkpoint)
    inputs = segments * float(BF16) * batch.tokens * model.hidden
    # Segments differ where the kind of layer changes, and the last one may be shorter.
    at = {0, layers.masked // checkpoint, layers.masked // checkpoint + 1, segments - 1}
    starts = [index * checkpoint for index in at if index < segments]
    return inputs, max(layers.saved(first, min(first + checkpoint, layers.count)) for first in starts)


def _peak_of_layers(layers: _Layers, kept: float, again: float, head: HeadCost, d_hidden: float) -> float:
    """Returns the peak of the last norm's and layer's backward pass, when the gradient of the head's weight exists."""
    last = layers.last
    at_norm = kept + layers.norm.saved + layers.norm.transient
    at_mlp = kept + again + d_hidden + last.mlp.transient
    at_mixer = kept + again - last.mlp.saved + d_hidden + last.mixer.transient
    return head.gradient_bytes + max(at_norm, at_mlp, at_mixer)


def predict(
    model: Model,
    batch: Batch,
    head: Head,
    *,
    optimizer: str = "adamw",
    checkpoint: int = 0,
    device: str = "h200",
) -> Step:
    """Predicts one training step of a bf16 model on one GPU, without accumulation of gradients.

    Args:
        model: The model's sizes.
        batch: The batch of one step.
        head: The implementation of the head.
        optimizer: ``adamw``, ``adamw-fp32``, ``adamw-fp32-master``, ``sgd`` or ``sgd-momentum``.
        checkpoint: Layers of a segment whose activations are made again in the backward pass (Chen et al.,
            arXiv:1604.06174). 0 is no checkpointing, 1 is that of transformers' ``gradient_checkpointing_enable``.
        device: ``a100``, ``h100`` or ``h200``.

    Raises:
        ValueError: An option is out of range.
        BudgetTooSmallError: No plan of Logitless fits the head's budget.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if not 0 <= checkpoint <= model.layers:
        raise ValueError(f"checkpoint: expected 0 to the {model.layers} layers, got {checkpoint}")
    place = find_device(device)
    layers = _layers(model, batch)
    norm, count = layers.norm, parameters(model)
    states, moved = OPTIMIZERS[optimizer]
    weights, optimizer_bytes = float(BF16) * count, float(states) * count
    kept, again = _saved(layers, batch, model, checkpoint)
    cost = head_cost(head, model, batch, place)
    d_hidden = float(BF16) * batch.tokens * model.hidden
    embedding = cost.gradient_bytes  # the embedding's own gradient, before it is added to a tied head's
    peaks = {
        "head": kept + norm.saved + cost.held_bytes,
        "layers": _peak_of_layers(layers, kept, again, cost, d_hidden),
        "gradients": weights + (embedding if model.tied else 0.0) + d_hidden,
    }
    peak_at = max(peaks, key=lambda name: peaks[name])
    body = sum((layer.whole.forward.times(n) for n, layer in layers.each()), norm.forward)
    head_flop = 6.0 * batch.tokens * model.vocab * model.hidden
    model_flop = 3 * body.flop + head_flop
    return Step(
        parameters=count,
        model_flop=model_flop,
        head_flop_share=head_flop / model_flop,
        weight_bytes=weights,
        optimizer_bytes=optimizer_bytes,
        saved_bytes=kept + norm.saved,
        head_bytes=cost.held_bytes,
        peak_bytes=weights + optimizer_bytes + LIBRARIES + peaks[peak_at],
        peak_at=peak_at,
        layers_seconds=_layers_seconds(layers, checkpoint, place),
        optimizer_seconds=count * moved / (BANDWIDTH_SHARE * place.peak_bandwidth),
        head_seconds=cost.seconds,
        head=cost,
    )


def largest_batch(model: Model, length: int, head: Head, memory_bytes: float, **options: Any) -> int:
    """Returns the most sequences whose predicted step fits in this memory, or 0 if not even one does.

    Args:
        model: The model's sizes.
        length: Tokens of a sequence.
        head: The implementation of the head.
        memory_bytes: The memory.
        options: Options of :func:`predict`.
    """

    def fits(sequences: int) -> bool:
        try:
            return predict(model, Batch(sequences, length), head, **options).peak_bytes <= memory_bytes
        except BudgetTooSmallError:
            return False
        except UnsupportedError:  # too many tokens: draws have at most 2^31 elements, for example
            if sequences == 1:
                raise
            return False

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
