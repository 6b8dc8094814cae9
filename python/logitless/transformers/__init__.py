"""Models of Hugging Face transformers compute their training loss without the logits, by one line.

    import logitless.transformers
    model = logitless.transformers.patch(model)

See :func:`patch` and docs/hugging_face.md. This package needs PyTorch. It never imports transformers: it only looks at
the model that it is given.
"""

from __future__ import annotations

from ._patch import patch, unpatch

__all__ = ["patch", "unpatch"]
