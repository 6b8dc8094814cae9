"""Work and memory of operations: what layers are added up from.

Sizes are those of a bf16 model whose operations run one by one (PyTorch's eager mode). Memory is what autograd keeps of
the forward pass for the backward pass. Traffic is the bytes that operations without matrix products read and write.
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
    """Work of a forward or of a backward pass: FLOP, but for the traffic."""

    products: float = 0.0  # of matrices
    attention: float = 0.0  # causal attention's kernels, and chunks of recurrences
    masked: float = 0.0  # attention's kernels that are given a mask
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
    """The work of one operation, or of several, one after the other."""

    parameters: int = 0  # their number
    forward: Pass = Pass()
    backward: Pass = Pass()
    saved: float = 0.0  # bytes that autograd keeps between the passes
    transient: float = 0.0  # bytes at most that the backward pass holds beyond what is saved and weights' gradients

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
    """y = x W^T: 2 FLOP a weight and token, twice that backward, for x and W. The x that it saves is not here:
    several layers of one input save it once."""
    flop = 2.0 * tokens * inputs * outputs
    parameters = inputs * outputs + (outputs if bias else 0)
    return Work(parameters, Pass(products=flop), Pass(products=2 * flop))


def saved(tokens: int, elements: float, size: int = BF16) -> Work:
    """Elements a token that are kept for the backward pass."""
    return Work(saved=float(tokens) * elements * size)


def moved(tokens: int, elements: int, forward: int, backward: int) -> Work:
    """Bytes that operations read and write, an element."""
    count = float(tokens) * elements
    return Work(forward=Pass(traffic=count * forward), backward=Pass(traffic=count * backward))


def transient(tokens: int, bytes_a_token: float) -> Work:
    return Work(transient=tokens * bytes_a_token)


def eager_norm(tokens: int, width: int, rows: int = 1, gemma: bool = False) -> Work:
    """RMSNorm as transformers writes it, in float32; its output is saved by what comes next.

    Saved (LlamaRMSNorm): x in float32 (twice used, once kept), a number a row, the normalized x in bf16. Gemma's
    multiplies by 1 + weight in float32, so that the normalized x is kept in float32. Traffic: bytes an element of each
    of the operations (conversions, pow, mean, products, sums) that PyTorch's dispatcher shows: tests/python compares.
    Backward at most four float32 tensors are alive.
    """
    elements = width * rows
    kept = total(
        saved(tokens, elements, FP32), saved(tokens, rows, FP32), saved(tokens, elements, FP32 if gemma else BF16)
    )
    bytes_moved = moved(tokens, elements, 40, 104) if gemma else moved(tokens, elements, 36, 92)
    return total(Work(parameters=width), kept, bytes_moved, transient(tokens, 4 * FP32 * elements))


def eager_gated_mlp(tokens: int, hidden: int, intermediate: int) -> Work:
    """down(act(gate(x)) * up(x)): x, gate, act, up and their product are kept."""
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
    """x + f(x): nothing is kept; the gradients of both branches are added."""
    return moved(tokens, hidden, 6, 6)
