"""LoRA on the head: TRL's trainers refuse it, as TRL's own head leaves it out. Fused heads have it."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from ..errors import UnsupportedError
from ..transformers._heads import layers_of
from ._step import StandIn, has_adapter, run

TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in "sft dpo kto grpo rloo".split())


class Refused:
    """The classes of PEFT that TRL's trainers refuse as a head, in place of all adapters of PEFT."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __instancecheck__(self, head: Any) -> bool:
        refused = isinstance(head, self.original)
        # Constructors ask this for the loss. GRPO's cast of the head to float32 asks as well, and leaves out LoRA.
        if refused and hasattr(head, "lora_A") and sys._getframe(1).f_code.co_name == "__init__":
            try:
                layers_of(head, type(head).__name__)
            except UnsupportedError:
                return True
            return False
        return refused


class AddFusedHead(StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.fused(None, *args, **kwargs)

    def fused(
        self,
        options: None,
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        """Gives the model TRL's fused head; its calls are steps where an adapter has changed its head."""
        self.original(model, temperature, cast_lm_head_to_fp32, outputs)
        own = model.forward.__func__

        @functools.wraps(own)
        def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("fused_lm_head") or not has_adapter(self.get_output_embeddings()):
                return own(self, *args, **kwargs)
            return run(self, None, functools.partial(own, self), args, kwargs)

        model.forward = types.MethodType(forward, model)
