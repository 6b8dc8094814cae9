"""Work and memory of operations, from which layers are added up.

Sizes are for a bf16 model whose operations run one by one (PyTorch's eager mode). Memory is what autograd keeps from
the forward pass for the backward pass. Traffic is the bytes that operations other than matrix products read and write.
"""

from __future__ import annotations

import dataclasses
import operator

from .config import check_number

BF16, FP32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of one length."""

    sequences: int
    length: int

    def __post_init__(self) -> None:
        for name, value in (("sequences", self.sequences), ("length", self.length)):
            check_number(name, value, 1)

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclasses.dataclass(frozen=True)
class Pass:
    """Work of a forward or a backward pass, in FLOP; the traffic is in bytes."""

    products: float = 0.0  # matrix products
    attention: float = 0.0  # kernels of causal attention, and chunks of recurrences
    masked: float = 0.0  # kernels of attention with a mask
    traffic: float = 0.0  # bytes of all other operations

    def __add__(self, other: Pass) -> Pass:
        return Pass(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def times(self, factor: float) -> Pass:
        return Pass(*(factor * value for value in dataclasses.astuple(self)))

    @property
    def flop(self) -> float:
        return self.products + self.attention + self.masked


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one operation, or of several in sequence."""

    parameters: int = 0  # number of parameters
    forward: Pass = Pass()
    backward: Pass = Pass()
    saved: float = 0.0  # bytes that autograd keeps between the passes
    transient: float = 0.0  # the most bytes that the backward pass holds beyond saved tensors and weights' gradients

    def __add__(self, other: Work) -> Work:
        return Work(
            self.parameters + other.parameters,
            self.forward + other.forward,
            self.backward + other.backward,
            self.saved + other.saved,
            max(self.transient, other.transient),
        )


def total(*parts: Work) -> Work:
    return sum(parts, Work())


def linear(tokens: int, inputs: int, outputs: int, bias: bool = False) -> Work:
    """y = x W^T takes 2 FLOP for each weight and token, and twice that in the backward pass, for x and W.

    The saved x is not included: several layers with one input save it once.
    """
    flop = 2.0 * tokens * inputs * outputs
    parameters = inputs * outputs + (outputs if bias else 0)
    return Work(parameters, Pass(products=flop), Pass(products=2 * flop))


def saved(tokens: int, elements: float, size: int = BF16) -> Work:
    """Elements of each token that are kept for the backward pass."""
    return Work(saved=float(tokens) * elements * size)


def moved(tokens: int, elements: int, forward: int, backward: int) -> Work:
    """Bytes for each element that operations read and write in the forward and the backward pass."""
    count = float(tokens) * elements
    return Work(forward=Pass(traffic=count * forward), backward=Pass(traffic=count * backward))


def transient(tokens: int, bytes_a_token: float) -> Work:
    return Work(transient=tokens * bytes_a_token)


def eager_norm(tokens: int, width: int, rows: int = 1, gemma: bool = False) -> Work:
    """RMSNorm in float32, as transformers writes it; the next operation saves its output.

    LlamaRMSNorm saves x in float32 (used twice, kept once), a number for each row, and the normalized x in bf16.
    Gemma's norm multiplies by 1 + weight in float32, so the normalized x is kept in float32. The traffic is that of all
    operations (conversions, pow, mean, products, sums) that PyTorch's dispatcher shows; tests/python compares it. In
    the backward pass at most four float32 tensors exist.
    """
    elements = width * rows
    kept = total(
        saved(tokens, elements, FP32), saved(tokens, rows, FP32), saved(tokens, elements, FP32 if gemma else BF16)
    )
    bytes_moved = moved(tokens, elements, 40, 104) if gemma else moved(tokens, elements, 36, 92)
    return total(Work(parameters=width), kept, bytes_moved, transient(tokens, 4 * FP32 * elements))


def eager_gated_mlp(tokens: int, hidden: int, intermediate: int) -> Work:
    """down(act(gate(x)) * up(x)), which keeps x, gate, act, up and their product."""
    return total(
        linear(tokens, hidden, intermediate),
        linear(tokens, hidden, intermediate),
        linear(tokens, intermediate, hidden),
        saved(tokens, hidden + 4 * intermediate),
        moved(tokens, intermediate, 4 + 6, 6 + 6 + 6),
        moved(tokens, hidden, 0, 6),  # the sum of x's two gradients
        transient(tokens, 3 * BF16 * intermediate),
    )


def residual(tokens: int, hidden: int) -> Work:
    """x + f(x), which keeps nothing; the backward pass adds the gradients of both branches."""
    return moved(tokens, hidden, 6, 6)
