"""Compares a call of logitless.compat with eager PyTorch over whole logits, in float64 and in the inputs' precision."""

from __future__ import annotations

import torch

UNITS = {torch.float64: 2.0**-48, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8}


def head(rows=13, vocab=29, hidden=7, *, seed=0, ignored=(0, 3, 4), ignore_index=-100, size=2.0):
    """Returns leaves input, weight and bias in float64 (bfloat16 numbers), and a target with ignored rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).mul(size).bfloat16().double()

    target = torch.randint(0, vocab, (rows,), generator=generator)
    for row in ignored:
        if row < rows:
            target[row] = ignore_index
    return {"input": normal(rows, hidden) / hidden**0.5, "weight": normal(vocab, hidden), "bias": normal(vocab)}, target


def run(function, leaves, dtype):
    """Returns outputs by name and gradients as d_name; each differentiable output has its own upstream gradient."""
    made = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
    outputs = function(**made)
    outputs = {"loss": outputs} if isinstance(outputs, torch.Tensor) else outputs
    generator = torch.Generator().manual_seed(1)
    terms = [
        (torch.rand(value.shape, generator=generator, dtype=torch.float64) * value.double()).sum()
        for value in outputs.values()
        if value.requires_grad
    ]
    sum(terms).backward()
    values = {name: value.detach() for name, value in outputs.items()}
    return values | {f"d_{name}": leaf.grad for name, leaf in made.items() if leaf.grad is not None}


def check(ours, reference, leaves, dtypes=(torch.float64, torch.float32)):
    """Asserts that outputs and gradients of ``ours`` have at most twice the error of ``reference``, plus a unit.

    Both are functions of the leaves, in this precision. ``reference`` computes logits in float32 at least. In float64
    it is the truth, with an error as in float32 but for the unit roundoff; that counts a third time.
    """
    for dtype in dtypes:
        rounded = to(leaves, dtype)
        truth = run(reference, rounded, torch.float64)
        narrow, times = (torch.float32, 3 / 2**29) if dtype == torch.float64 else (dtype, 2)
        naive, exact = (run(reference, to(leaves, narrow), kind) for kind in (narrow, torch.float64))
        got = run(ours, rounded, dtype)
        assert got.keys() == truth.keys(), (sorted(got), sorted(truth))
        for name, true in truth.items():
            assert got[name].shape == true.shape, (name, got[name].shape, true.shape)
            if not true.is_floating_point():
                assert torch.equal(got[name], true), name
                continue
            assert torch.equal(got[name].isnan(), true.isnan()), (name, dtype)
            error, allowed = largest(got[name].double() - true), times * largest(naive[name].double() - exact[name])
            unit = UNITS[dtype] * (1 + largest(true))
            assert error <= allowed + unit, (name, dtype, error, allowed, unit)


def to(leaves, dtype):
    """Returns the leaves, rounded to this dtype, in float64."""
    return {name: leaf.to(dtype).double() for name, leaf in leaves.items()}


def largest(values):
    """Returns the largest magnitude, 0 of none; NaN counts as 0."""
    return float(values.nan_to_num().abs().max()) if values.numel() else 0.0


def logits_of(input, weight, bias=None):
    """Computes logits in float32 at least, the precision in which products of 16-bit operands are summed."""
    wide = torch.promote_types(input.dtype, torch.float32)
    z = input.to(wide) @ weight.to(wide).T
    return z if bias is None else z + bias.to(wide)
