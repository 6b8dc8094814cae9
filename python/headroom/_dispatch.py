"""Which operators compute a loss: gradients together with it, or after it, once the upstream gradients are known."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _numbers, _ops, _options
from ._flags import Flags, Wants
from ._options import shape_text
from ._torch import Inputs, Losses

Seed = int | Tensor | torch.Generator | None


def check_seed(seed: Seed, device: torch.device) -> None:
    if isinstance(seed, Tensor):
        _checks.check_tensor("seed", seed)
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(f"seed: expected one int64 element, got {seed.dtype} of shape {shape_text(seed.shape)}")
        _checks.check_devices(device, {"seed": seed})
    elif isinstance(seed, torch.Generator):
        if seed.device.type != device.type:
            raise ValueError(f"seed: expected a generator on {device}, as input is, got one on {seed.device}")
    elif seed is not None:
        _options.checked_seed(seed)


def _seed_tensor(seed: Seed, device: torch.device) -> Tensor:
    """A scalar on the device, made outside of the operators: a recomputed forward pass draws the same elements."""
    if isinstance(seed, Tensor):
        return seed.reshape(())
    if seed is None or isinstance(seed, torch.Generator):
        return torch.randint(_options.SEED_RANGE, (), dtype=torch.int64, device=device, generator=seed)
    return torch.full((), seed, dtype=torch.int64, device=device)


def dispatch(
    inputs: Inputs,
    main_grad: Tensor | None,
    seed: Seed,
    names: tuple[str, ...],
    differentiable_stats: bool,
    options: dict[str, object],
) -> tuple[Losses, tuple[Tensor, ...]]:
    """Losses, and the statistics of the draw if any are asked for. The inputs lack seed and numbers."""
    grad = torch.is_grad_enabled()
    tensors = [getattr(inputs, name) for name in Wants._fields]
    trained = Wants(*(grad and t is not None and t.requires_grad for t in tensors))
    if not trained.scale:
        inputs = inputs._replace(scale=None)
    half = any(on and t.dtype == torch.float16 for t, on in zip(tensors[:3], trained))
    stats_need_gradients = differentiable_stats and any(name in ("nll", "lse", "entropy") for name in names)
    later = options["reduction"] == "none" or main_grad is not None or half or stats_need_gradients
    want_draw_stats = any(name in _options.DRAW_STATS for name in names)
    thinned = options["gradient"] == "thinned"
    keeps_draws = thinned and later and any(trained)
    options, numbers = _numbers.split(options, keeps_draws)
    if numbers is not None:
        inputs = inputs._replace(numbers=numbers)
    drawn = inputs
    if thinned and (any(trained) or want_draw_stats):
        drawn = inputs._replace(seed=_seed_tensor(seed, inputs.hidden.device))
    flags = Flags(
        per_token="nll" in names or "lse" in names,
        want_entropy="entropy" in names,
        want_argmax="argmax" in names or "correct_count" in names,
    )
    if any(trained) and not later:
        flags = Flags(*trained, *flags[len(trained) :])._replace(want_draw_stats=want_draw_stats)
        output = _ops.forward_backward(*drawn, **options, flags=flags.packed())
        return Losses(*output[:6]), output[6:8]
    flags = flags._replace(per_token=any(trained) or flags.per_token, keeps_draws=keeps_draws)  # lse is read later
    given = drawn if keeps_draws else inputs
    output = _ops.forward(*given, main_grad, **options, flags=flags.packed())
    return Losses(*output[:6]), _draw_stats(drawn, options) if want_draw_stats else ()


def _draw_stats(inputs: Inputs, options: dict[str, object]) -> tuple[Tensor, ...]:
    """Statistics of the draw where no gradient is made in the forward pass: from one whose result is left out."""
    constants = [None if tensor is None else tensor.detach() for tensor in inputs._replace(scale=None)]
    if options["reduction"] == "none":
        options = options | {"reduction": "sum"}
    flags = Flags(want_d_hidden=True, want_draw_stats=True)
    found: tuple[Tensor, ...] = _ops.forward_backward(*constants, **options, flags=flags.packed())[6:8]
    return found
