"""TRL's trainers compute log-probabilities, entropies and divergences of tokens without the logits, by one line.

    import logitless.trl
    logitless.trl.patch()

See :func:`patch` and docs/hugging_face.md. This package needs PyTorch; only :func:`patch` imports TRL.
"""

from __future__ import annotations

from ._patch import patch, unpatch

__all__ = ["patch", "unpatch"]
