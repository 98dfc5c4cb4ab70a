"""Synchronised layers of other libraries, recognised without importing those libraries."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from bnconvert.layers.own_forward import replaces_forward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class ForeignSync:
    """A synchronised layer class of another library.

    Attributes:
        library: Name of the library, for reports.
        dims: 1, 2 or 3 where the class says it; None where it takes any input.
        attributes: What its instances hold that a stock layer does not.
        plain_values: Attributes that must have this value for a stock layer to do the same.
    """

    library: str
    dims: int | None
    attributes: tuple[str, ...] = ()
    plain_values: Mapping[str, Any] | None = None


_APEX = ForeignSync(
    "apex", None, ("process_group", "channel_last", "fuse_relu"),
    {"channel_last": False, "fuse_relu": False},
)  # fmt: skip
_NAIVE = ("_stats_mode",)

BY_NAME: dict[tuple[str, str], ForeignSync] = {
    ("apex", "SyncBatchNorm"): _APEX,
    ("mmcv", "SyncBatchNorm"): ForeignSync("mmcv", None, ("group", "group_size", "stats_mode")),
    ("", "NaiveSyncBatchNorm"): ForeignSync("detectron2", 2, _NAIVE),
    ("", "NaiveSyncBatchNorm1d"): ForeignSync("fvcore", 1, (*_NAIVE, "num_groups", "world_size")),
    ("", "NaiveSyncBatchNorm2d"): ForeignSync("fvcore", 2, _NAIVE),
    ("", "NaiveSyncBatchNorm3d"): ForeignSync("fvcore", 3, (*_NAIVE, "num_groups", "world_size")),
    ("", "SynchronizedBatchNorm1d"): ForeignSync("sync_batchnorm", 1),
    ("", "SynchronizedBatchNorm2d"): ForeignSync("sync_batchnorm", 2),
    ("", "SynchronizedBatchNorm3d"): ForeignSync("sync_batchnorm", 3),
    ("encoding", "SyncBatchNorm"): ForeignSync(
        "encoding", None, ("activation", "slope", "sync"), {"activation": "none"}
    ),
}
"""(first part of the module's name, or "" for any; class name) -> what it is."""

_TORCH = ForeignSync("torch", None, ("process_group",))
_TIMM = ForeignSync("timm", 2, ("process_group",))


def describe(module: nn.Module) -> ForeignSync | None:
    """Return what foreign synchronised layer this is, or None."""
    for cls in type(module).__mro__:
        if cls.__name__ == "SyncBatchNormAct" and cls.__module__.startswith("timm."):
            return _TIMM
        if cls is nn.SyncBatchNorm:
            return _TORCH
        root = cls.__module__.partition(".")[0]
        known = BY_NAME.get((root, cls.__name__)) or BY_NAME.get(("", cls.__name__))
        if known is not None:
            return known
    return None


def blocker(module: nn.Module, foreign: ForeignSync) -> str:
    """Return why a stock layer cannot do what this layer does, or ""."""
    for name, value in (foreign.plain_values or {}).items():
        if getattr(module, name, value) != value:
            return f"its {name} is {getattr(module, name)!r}, which a stock layer does not do"
    return ""


def overrides_forward(module: nn.Module, foreign: ForeignSync) -> bool:
    """Whether a subclass, or the instance itself, changed the library's `forward`."""
    if replaces_forward(module):
        return True
    return type(module).forward is not library_class(module, foreign).forward


def library_class(module: nn.Module, foreign: ForeignSync) -> type[nn.Module]:
    """Return the library's own class among the bases of the layer's class."""
    found: type[nn.Module] = next(c for c in type(module).__mro__ if _is_library_class(c, foreign))
    return found


def _is_library_class(cls: type, foreign: ForeignSync) -> bool:
    if foreign is _TORCH:
        return cls is nn.SyncBatchNorm
    if foreign is _TIMM:
        return cls.__name__ == "SyncBatchNormAct"
    return any(cls.__name__ == name for (_, name), known in BY_NAME.items() if known is foreign)


def plain_class(module: nn.Module, foreign: ForeignSync, dims: int) -> type[nn.Module]:
    """Return the class that the layer becomes; timm's keeps its activation where it has one.

    torch's own converter drops the activation of timm's layers from what they compute and leaves
    it among their children, from where it comes back here.
    """
    activates = foreign in (_TIMM, _TORCH) and {"act", "drop"} <= module._modules.keys()
    norm_act = sys.modules.get("timm.layers.norm_act")
    if activates and norm_act is not None:
        act2d: type[nn.Module] = norm_act.BatchNormAct2d
        return act2d
    stock: dict[int, type[_BatchNorm]] = {
        1: nn.BatchNorm1d,
        2: nn.BatchNorm2d,
        3: nn.BatchNorm3d,
    }
    return stock[dims]
