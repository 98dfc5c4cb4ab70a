"""Layers that compute their weight before each forward, and the plain layers they can become."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.utils import parametrize

from bnconvert.errors import BnconvertError
from bnconvert.fold.become import become
from bnconvert.fold.hooks import computes_weight_in_hook

if TYPE_CHECKING:
    from bnconvert.plan import Undo

_STANDARDISED = {"StdConv2d", "ScaledStdConv2d", "StdConv2dSame", "ScaledStdConv2dSame"}


def plain_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of a layer that stores what this layer computes, if it is known."""
    cls = type(module)
    if parametrize.is_parametrized(module):
        base: type[nn.Module] = cls.__bases__[0]
        return base
    if cls.__name__ in _STANDARDISED and cls.__module__.startswith("timm."):
        if not getattr(module, "same_pad", False):
            return nn.Conv2d
        from timm.layers.conv2d_same import Conv2dSame

        same: type[nn.Module] = Conv2dSame
        return same
    return cls if computes_weight_in_hook(module) else None


def make_plain(module: nn.Module) -> Undo:
    """Turn a layer that computes its weight into one that stores it.

    Parametrizations and the pre-hooks of weight norm, spectral norm and pruning are dropped; the
    module's remaining parameters other than `bias` go with them. The weight is left for the caller
    to set.

    Raises:
        BnconvertError: The layer stores its weight.
    """
    cls = plain_class(module)
    if cls is None:
        raise BnconvertError(
            f"fold: {type(module).__name__} stores its weight and cannot be made plain; build the "
            "architecture that was folded"
        )
    plain = cls.__new__(cls)
    plain.__dict__ = {
        key: value.copy() if isinstance(value, dict) else value
        for key, value in module.__dict__.items()
        if not isinstance(value, Tensor)
    }
    weight = getattr(module, "weight").detach()  # noqa: B009 (a property when parametrized)
    trains = any(parameter.requires_grad for parameter in module.parameters())
    plain._parameters = {
        "weight": nn.Parameter(weight.clone(), requires_grad=trains),
        "bias": module._parameters.get("bias"),
    }
    if parametrize.is_parametrized(module, "bias"):
        bias = getattr(module, "bias").detach().clone()  # noqa: B009 (a property as well)
        plain._parameters["bias"] = nn.Parameter(bias, requires_grad=trains)
    plain._buffers, plain._modules = {}, {}
    for hooks in ("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
        plain.__dict__[hooks].clear()
    return become(module, plain)
