"""The heads that the studies compare: hidden states [N, D], weight [V, D] and targets [N] to a mean loss."""

from __future__ import annotations

from methods import Loss, Method, our_methods, peer_methods

# name in the studies: peer and method of bench/gpu/methods.py
PEERS = {
    "eager": ("canonical", "canonical"),
    "torch.compile": ("torch-compile", "torch.compile"),
    "fla": ("fla", "fla"),
    "liger": ("liger", "liger"),
    "cce": ("apple", "apple cce"),
    "cce unfiltered": ("apple-unfiltered", "apple cce unfiltered"),
    "cce_exact": ("apple", "apple cce_exact"),
    "cce_kahan_full_c": ("apple-kahan", "apple cce_kahan_full_c"),
}
OURS = {
    "logitless": "logitless unlimited",
    "logitless 160 MiB": "logitless 160 MiB",
    "thinned": "logitless thinned 2^-9",
}
BASELINE = "torch.compile"
ALL = (BASELINE, "fla", "liger", "cce_kahan_full_c", "logitless", "logitless 160 MiB", "thinned")
NAMES = (*PEERS, *OURS)


def make_head(name: str) -> Loss:
    """Raises ImportError where the head's package is missing."""
    if name in OURS:
        found = our_methods([None, 160], [""], [9])
        return next(method.loss for method in found if method.name == OURS[name])
    if name not in PEERS:
        raise ValueError(f"--heads: expected names out of {', '.join(NAMES)}; got {name!r}")
    peer, wanted = PEERS[name]
    methods: list[Method]
    methods, missing = peer_methods(peer)
    if missing:
        raise ImportError(missing[0])
    return next(method.loss for method in methods if method.name == wanted)
