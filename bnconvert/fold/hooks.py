"""Hooks that users put on modules, as opposed to those by which layers compute their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

if TYPE_CHECKING:
    from torch import nn

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_COMPUTE_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)


def computes_weight_in_hook(module: nn.Module) -> bool:
    """Whether weight norm, spectral norm or pruning computes a weight before each forward."""
    return any(isinstance(hook, _COMPUTE_WEIGHTS) for hook in module._forward_pre_hooks.values())


def user_hook(module: nn.Module) -> str:
    """Return a phrase for the first hook that a user put on the module, "" if there is none."""
    for attribute, kind in _KINDS.items():
        for hook in (getattr(module, attribute, None) or {}).values():
            if not isinstance(hook, _COMPUTE_WEIGHTS):
                name = getattr(hook, "__name__", type(hook).__name__)
                return f"the {kind} {name}"
    return ""
