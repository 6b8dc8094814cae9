"""Methods and heads of records in the words of the pages.

Records keep the short names of the programs that wrote them, so a page's words may change without a new run.
"""

from __future__ import annotations

import re

MATMULS = "three matmuls"
NAMES = {
    "three bare products": MATMULS,
    "canonical": "PyTorch eager (transformers' default)",
    "stock": "stock (the model's own head)",
    "torch.compile": "torch.compile",
    "torch fused": "PyTorch's `F.linear_cross_entropy`",
    "torch fused chunked": "PyTorch's `F.linear_cross_entropy`, in chunks",
    "torch fused 2048 rows": "PyTorch's `F.linear_cross_entropy`, in chunks of 2,048",
    "liger": "Liger",
    "liger fp32": "Liger, float32 sums",
    "liger fp32 sums": "Liger, float32 sums",
    "liger larger chunk": "Liger, 32 times the chunk",
    "liger cutedsl": "Liger, CuTe DSL",
    "liger scaled": "Liger, CuTe DSL, per-token operator",
    "liger cutile": "Liger, cuTile",
    "liger cutile scaled": "Liger, cuTile, per-token operator",
    "apple cce": "cut-cross-entropy (drops small gradients)",
    "cce": "cut-cross-entropy (drops small gradients)",
    "apple cce_exact": "cut-cross-entropy, exact, float32 sums",
    "apple torch_compile": "cut-cross-entropy, torch.compile",
    "verl": "verl",
    "verl whole dz": "verl, all of dz at once",
    "megatron": "Megatron-LM",
    "fla": "flash-linear-attention",
    "trl": "TRL",
    "quack": "QuACK",
    "quack untuned": "QuACK, untuned",
    "quack scaled-exp": "QuACK, scaled exp",
    "quack, one chunk": "QuACK, one chunk",
    "quack untuned, one chunk": "QuACK, untuned, one chunk",
    "quack scaled-exp, one chunk": "QuACK, scaled exp, one chunk",
    "sparsified": "Logitless, sparsified",
}
# Gradients of methods that are not exact.
FILTERED = ("apple cce",)
EXACT, UNBIASED, FILTERS = "exact", "unbiased", "filtered"


def budget_words(name: str) -> str:
    """Returns the words for a method's budget or for its sparsified gradients."""
    known = {"": '`"fastest"`', "unlimited": '`"fastest"`', "default": "nothing given", "fp8": "fp8 logits"}
    return known.get(name, name)


def in_words(method: str) -> str:
    """Returns the pages' name of a method or a head."""
    name = method
    match = re.fullmatch(r"logitless(?:/(\w+))?(?: (.*))?", name)
    if not match:
        return NAMES.get(name, name)
    engine, rest = match[1], match[2] or ""
    return f"Logitless{f' ({engine})' if engine else ''}, {budget_words(rest)}"


def gradients_are(method: str) -> str:
    """Returns whether a method's loss and gradients are exact, unbiased or filtered."""
    if "sparsified" in method:
        return UNBIASED
    return FILTERS if method in FILTERED else EXACT


def plain(words: str) -> str:
    """Returns words without Markdown, for a plot."""
    return words.replace("`", "")
