"""The norm layers, and what relates them: families, class derivation, kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.layers.frozen import FrozenBatchNorm1d, FrozenBatchNorm2d, FrozenBatchNorm3d
from bnconvert.layers.kinds import Kind, kind_of
from bnconvert.layers.sync import SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "FrozenBatchNorm1d",
    "FrozenBatchNorm2d",
    "FrozenBatchNorm3d",
    "Kind",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "is_synchronized",
    "kind_of",
]


def is_synchronized(module: nn.Module) -> bool:
    """Whether a module is, or contains, a synchronised BatchNorm of bnconvert or another library.

    Args:
        module: A layer or a model.
    """
    return any(kind_of(m) in (Kind.SYNC, Kind.FOREIGN_SYNC) for m in module.modules())
