"""One line for models of Hugging Face transformers: their training loss without the logits.

    import logitless.transformers
    model = logitless.transformers.patch(model)

See :func:`patch` and docs/hugging_face.md. This package needs PyTorch; transformers itself is never imported here, the
model that is handed over decides.
"""

from __future__ import annotations

from ._patch import patch, unpatch

__all__ = ["patch", "unpatch"]
