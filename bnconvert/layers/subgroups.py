"""Process groups of consecutive ranks, made once per size and shared by all layers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GROUPS: weakref.WeakKeyDictionary[ProcessGroup, dict[int, ProcessGroup]] | None = None


def check_group_size(group_size: int) -> None:
    """Refuse a size that does not divide the ranks into whole groups.

    Raises:
        BnconvertError: It is no integer, torch.distributed is not initialized, or the size does
            not fit.
    """
    import torch.distributed as dist

    if not isinstance(group_size, int) or isinstance(group_size, bool):
        raise BnconvertError(f"group_size: expected a number of ranks, got {group_size!r}")
    if not dist.is_available() or not dist.is_initialized():
        raise BnconvertError(
            "group_size: torch.distributed is not initialized; call init_process_group first"
        )
    world = dist.get_world_size()
    if group_size < 1 or world % group_size:
        raise BnconvertError(
            f"group_size: the world size {world} is not divisible by {group_size}; choose a "
            f"divisor of {world}"
        )


def consecutive_group(group_size: int) -> ProcessGroup | None:
    """Return this rank's group of consecutive ranks; the first call for a size is collective.

    Args:
        group_size: Ranks per group; the world size gives the default group, which is None.
    """
    global _GROUPS
    import torch.distributed as dist

    if group_size == dist.get_world_size():
        return None
    if _GROUPS is None:
        _GROUPS = weakref.WeakKeyDictionary()
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 (initialized, as checked before)
    known = _GROUPS.setdefault(world, {})
    if group_size not in known:
        known[group_size] = dist.new_subgroups(group_size)[0]
    return known[group_size]
