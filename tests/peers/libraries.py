"""Ways for other libraries' tests to reach logitless.compat, with references from their files.

A library's tests compare with the library's own reference. It is taken out of the source if it runs without a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import typing
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from logitless.compat import cut_cross_entropy, fla, liger_kernel, prime_rl, quack, veomni, verl
from stand_ins import definitions, original, package, stand_in
from torch import Tensor, nn

DEVICE_FUNCTIONS = ("empty_cache", "get_device_type", "get_torch_device", "synchronize")
NAMES = {"torch": torch, "F": F, "Tensor": Tensor, "Optional": typing.Optional, "Literal": typing.Literal}


def public(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def prepare_cut_cross_entropy(repository: Path) -> None:
    def lse(e: Tensor, c: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
        any_target = torch.zeros(len(e), dtype=torch.long)
        return cut_cross_entropy.linear_cross_entropy(e, c, any_target, bias=bias, softcap=softcap, return_lse=True)[1]

    folder = repository / "cut_cross_entropy"
    softcapping = definitions(folder / "utils.py", "softcapping", **NAMES)
    stand_in("cut_cross_entropy", linear_cross_entropy=cut_cross_entropy.linear_cross_entropy)
    stand_in("cut_cross_entropy.constants", **definitions(folder / "constants.py", "IGNORE_INDEX"))
    stand_in("cut_cross_entropy.utils", compute_z_loss=cut_cross_entropy.compute_z_loss, **softcapping)
    stand_in("cut_cross_entropy.cce_lse_forward", cce_lse_forward_kernel=lse)


def prepare_liger_kernel(repository: Path) -> None:
    original("liger_kernel.utils", repository / "src" / "liger_kernel")
    # Its test takes a reference from another function's test, which imports what that needs.
    others = ("LigerCrossEntropyFunction", "LigerCrossEntropyLoss", "liger_cross_entropy", "liger_cross_entropy_kernel")
    modules = ("ops", "ops.cross_entropy", "transformers.functional", "transformers.cross_entropy")
    for module in (*modules, "transformers.fused_linear_cross_entropy"):
        stand_in(f"liger_kernel.{module}", **dict.fromkeys(others), **public(liger_kernel))
    stand_in("liger_kernel.ops.utils", is_hip=lambda: False)


class CrossEntropy(nn.Module):
    """Replaces ``fla.modules.FusedCrossEntropyLoss``, the reference of FLA's tests, which needs a GPU."""

    def __init__(
        self, logit_scale: float = 1.0, logit_softcapping: float | None = None, reduction: str = "mean"
    ) -> None:
        super().__init__()
        self.scale, self.softcap, self.reduction = logit_scale, logit_softcapping, reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float() * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.cross_entropy(logits, target, reduction=self.reduction)


def prepare_fla(repository: Path) -> None:
    folder = repository / "fla"
    close = definitions(
        folder / "utils" / "_testing.py",
        "get_abs_err",
        "get_err_ratio",
        "assert_close",
        **NAMES,
        logger=logging.getLogger("fla"),
        warnings=warnings,
        FLA_CI_ENV=False,
    )
    stand_in("fla.utils", device="cpu", device_platform="cpu", IS_INTEL_ALCHEMIST=False, **close)
    stand_in("fla.modules", FusedCrossEntropyLoss=CrossEntropy, **public(fla))
    original("fla.modules.l2warp", folder / "modules")


def prepare_quack(repository: Path) -> None:
    file = repository / "quack" / "linear_cross_entropy.py"
    reference = definitions(file, "linear_cross_entropy_func_ref", **NAMES)
    stand_in("quack.linear_cross_entropy", scaled_exp_lce_supported=lambda *_: True, **reference, **public(quack))


def prepare_verl(repository: Path) -> None:
    def cross_entropy_loss(logits: Tensor, labels: Tensor, inplace_backward: bool) -> tuple[Tensor, None]:
        """Replaces flash_attn's function, which needs a GPU. Without it verl's reference wants other labels."""
        return F.cross_entropy(logits, labels, reduction="none"), None

    utils = repository / "verl" / "utils"
    functions = definitions(
        utils / "torch_functional.py",
        "entropy_from_logits",
        "logprobs_from_logits",
        "logprobs_from_logits_flash_attn",
        **NAMES,
        os=os,
        cross_entropy_loss=cross_entropy_loss,
        FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE=True,
    )
    stand_in("verl.utils.torch_functional", **functions)
    stand_in("verl.utils.device", is_torch_npu_available=lambda check_device=True: False)
    stand_in("verl.utils.kernel.linear_cross_entropy", **public(verl))
    original("verl.utils.experimental.torch_functional", utils / "experimental")


def prepare_veomni(repository: Path) -> None:
    stand_in("veomni.distributed.parallel_state", get_parallel_state=lambda: SimpleNamespace(sp_enabled=False))
    stand_in("veomni.utils.device", IS_CUDA_AVAILABLE=False, **dict.fromkeys(DEVICE_FUNCTIONS))
    original("veomni.utils.constants", repository / "veomni" / "utils")
    functions = public(veomni)
    stand_in("veomni.ops.kernels.cross_entropy", **functions)
    for module in ("chunk_logprobs", "chunk_topk_distill"):  # whose other names their tests replace
        more = {"get_parallel_state": None, "_FA_CE_AVAILABLE": False}
        stand_in(f"veomni.ops.kernels.cross_entropy.{module}", **functions, **more)


def prepare_prime_rl(repository: Path) -> None:
    folder = repository / "src" / "prime_rl"
    stand_in("prime_rl.utils.logger", get_logger=lambda: logging.getLogger("prime_rl"))
    package("prime_rl.utils", folder / "utils")
    heads = original("prime_rl.trainer.models.layers.lm_head", folder / "trainer" / "models" / "layers")
    vars(heads).update(FusedOutputLinear=prime_rl.FusedOutputLinear)
    stand_in("prime_rl.trainer.models", cast_float_and_contiguous=heads.cast_float_and_contiguous)
    stand_in("prime_rl.trainer.models.llama", LlamaForCausalLM=None)  # belongs to a test that prime-rl skips
    functions = definitions(
        folder / "trainer" / "rl" / "loss.py",
        "selective_log_softmax",
        "compute_entropy",
        "shift_tensor_left",
        "shift_tensor_right",
        **NAMES,
        Float=typing.Annotated,
        Int=typing.Annotated,
        jaxtyped=lambda typechecker: lambda function: function,
        typechecker=None,
    )
    stand_in("prime_rl.trainer.rl.loss", **functions)
    dtype = definitions(
        folder / "utils" / "utils.py", "default_dtype", **NAMES, contextmanager=contextlib.contextmanager
    )
    stand_in("prime_rl.utils.utils", **dtype)
