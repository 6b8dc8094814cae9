"""One line for TRL's trainers: per-token log-probabilities and entropies without the logits.

    import logitless.trl
    logitless.trl.patch()

See :func:`patch` and docs/hugging_face.md. This package needs PyTorch; TRL is imported by :func:`patch` only.
"""

from __future__ import annotations

from ._patch import patch, unpatch

__all__ = ["patch", "unpatch"]
