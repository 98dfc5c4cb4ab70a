"""Telling what a module is, from facts: its class, its `forward`, its buffers, its graph."""

from __future__ import annotations

import enum
import re
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from bnconvert.layers import classes, families, foreign
from bnconvert.layers.own_forward import replaces_forward
from bnconvert.layers.sync import SyncMixin


class Kind(enum.Enum):
    """What sort of BatchNorm a module is; the value says it in words."""

    PLAIN = "plain"
    SYNC = "synchronised by bnconvert"
    FROZEN = "frozen by bnconvert"
    FOREIGN_SYNC = "synchronised by another library"
    FOREIGN_FROZEN = "frozen by another library"
    IN_PLACE = "in-place activated BatchNorm"
    LAZY = "lazy, not initialized"
    SCRIPTED = "scripted"
    EXPORTED = "exported graph"
    UNKNOWN = "unknown"


_NOT_BY_CLASS: set[type] = set()
"""Classes that are no BatchNorm unless an instance holds running statistics."""

_IN_PLACE_NAMES = {"InPlaceABN", "InPlaceABNSync", "InplaceAbn", "ABN"}
_FROZEN_NAMES = re.compile(r"^Frozen_?(Batch_?Norm|BN)", re.IGNORECASE)
_LEAF_NAMES = re.compile(r"batch_?(re)?norm", re.IGNORECASE)
_STATISTICS = ("running_mean", "running_var")


def kind_of(module: nn.Module) -> Kind | None:
    """Return what kind of BatchNorm the module is, or None for any other module."""
    cls = type(module)
    if cls in _NOT_BY_CLASS:
        return Kind.UNKNOWN if _holds_statistics(module) else None
    if isinstance(module, torch.jit.ScriptModule):
        return Kind.SCRIPTED if _is_scripted_norm(module) else None
    kind = _kind_by_type(module)
    if kind is None and not _holds_statistics(module) and not _depends_on_instance(cls):
        _NOT_BY_CLASS.add(cls)
    if kind is None and not isinstance(module, _InstanceNorm) and _holds_statistics(module):
        return Kind.UNKNOWN
    return kind


def _depends_on_instance(cls: type) -> bool:
    special = (torch.fx.GraphModule, _InstanceNorm)
    return issubclass(cls, special) or _LEAF_NAMES.search(cls.__name__) is not None


def _kind_by_type(module: nn.Module) -> Kind | None:
    if isinstance(module, torch.fx.GraphModule):
        return Kind.EXPORTED if _calls_batch_norm(module) else None
    if isinstance(module, _InstanceNorm):
        return None
    if isinstance(module, _LazyNormBase):
        return Kind.LAZY
    return _kind_by_class(module, classes.bottom(type(module)))


def _kind_by_class(module: nn.Module, cls: type[nn.Module]) -> Kind | None:
    if issubclass(cls, SyncMixin):
        return Kind.SYNC
    if _is_ours_frozen(cls):
        return Kind.FROZEN
    if foreign.describe(module) is not None:
        return Kind.FOREIGN_SYNC
    if cls.__name__ in _IN_PLACE_NAMES:
        return Kind.IN_PLACE
    if _FROZEN_NAMES.match(cls.__name__):
        return Kind.FOREIGN_FROZEN
    if isinstance(module, _BatchNorm):
        return Kind.PLAIN if _runs_known_forward(module, cls) else Kind.UNKNOWN
    leaf = not module._modules and _LEAF_NAMES.search(cls.__name__)
    return Kind.UNKNOWN if leaf else None


def _is_ours_frozen(cls: type[nn.Module]) -> bool:
    return any(issubclass(cls, mixin) for mixin in families.FROZEN_MIXINS.values())


def _runs_known_forward(module: nn.Module, cls: type[nn.Module]) -> bool:
    return (
        not replaces_forward(module)
        and type(module).forward is cls.forward
        and type(module).__call__ is nn.Module.__call__
        and families.sync_mixin(cls) is not None
    )


def _holds_statistics(module: nn.Module) -> bool:
    """Whether the module has a running mean or variance, set or None, and code that uses them.

    In an exported graph, modules without a forward hold the buffers of what were layers.
    """
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        return False
    places: tuple[dict[str, Any], ...] = (module._buffers, module._parameters, module.__dict__)
    return any(name in place for place in places for name in _STATISTICS)


def _is_scripted_norm(module: torch.jit.ScriptModule) -> bool:
    name = str(getattr(module, "original_name", ""))
    return _LEAF_NAMES.search(name) is not None and not list(module.children())


def _calls_batch_norm(module: torch.fx.GraphModule) -> bool:
    return any(
        node.op == "call_function" and "batch_norm" in str(node.target)
        for node in module.graph.nodes
    )


def why_unknown(module: nn.Module) -> str:
    """Return what makes a BatchNorm-like module unknown, as a sentence."""
    cls = type(module)
    if replaces_forward(module):
        return "its forward was replaced on the instance"
    if isinstance(module, _BatchNorm):
        own = "__call__" if cls.__call__ is not nn.Module.__call__ else "forward"
        return f"{cls.__qualname__} overrides {own} of {_stock_base(cls).__name__}"
    if _holds_statistics(module):
        return f"{cls.__qualname__} has running statistics and is no torch BatchNorm"
    return f"{cls.__qualname__} is named like a BatchNorm and is none of torch's"


def _stock_base(cls: type) -> type:
    return next(base for base in cls.__mro__[1:] if base.__module__.startswith("torch.nn.modules"))
