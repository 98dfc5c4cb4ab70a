"""The process group of a layer: survives `deepcopy`, is never pickled, resolved when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup


GROUP_KEY = "_bnconvert_group"
"""The attribute with a layer's `GroupRef`; the only thing that conversion adds to a layer."""


class GroupRef:
    """Refers to a process group, or to the default group of the time of use.

    Attributes:
        group: The process group; None is the default group.
        name: The name by which operators find the group; "" for the default group.
        lost: Whether a group was set before pickling: the default group is used since.
    """

    __slots__ = ("group", "lost", "name")

    def __init__(self, group: ProcessGroup | None = None, *, lost: bool = False) -> None:
        self.group = group
        self.name = ""
        if group is not None:
            from bnconvert.kernels import comm  # imports torch.distributed

            self.name = comm.name_of(group)
        self.lost = lost

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.group is not None or self.lost,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupRef) and self.group is other.group

    __hash__ = None  # type: ignore[assignment]

    def describe(self) -> str:
        """Return the group in words: "default group" or its ranks."""
        if self.group is None:
            return "default group (its own was lost in pickling)" if self.lost else "default group"
        from bnconvert.kernels import comm

        try:
            return f"ranks {ranges(comm.ranks_of(self.group))}"
        except BnconvertError:
            return f"group {self.name!r}, which exists no more"


def group_of(layer: Any) -> ProcessGroup | None:
    """Return the group of a synchronised layer of any library; None is the default group."""
    ours: GroupRef | None = layer.__dict__.get(GROUP_KEY)
    group: ProcessGroup | None
    group = getattr(layer, "process_group", None) if ours is None else ours.group
    return group


def _unpickled(lost: bool) -> GroupRef:
    return GroupRef(lost=lost)


def ranges(ranks: Iterable[int]) -> str:
    """Return "0-7" or "0-3, 8" for sorted ranks."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def check_group(group: Any) -> None:
    """Refuse what is not a process group of which this rank is a member.

    Raises:
        BnconvertError: It is of another type, or this rank is not in it.
    """
    import torch.distributed as dist

    if group is None:
        return
    if not dist.is_available() or not dist.is_initialized():
        raise BnconvertError(
            "process_group: torch.distributed is not initialized; call init_process_group first"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise BnconvertError(
            f"process_group: rank {dist.get_rank()} is not a member of it; give each rank the "
            "group that it is in"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise BnconvertError(
            f"process_group: expected a torch.distributed ProcessGroup, got "
            f"{type(group).__name__}; make one with torch.distributed.new_group"
        )
    if dist.get_rank(group) < 0:
        raise BnconvertError(
            f"process_group: rank {dist.get_rank()} is not a member of it "
            f"({GroupRef(group).describe()}); give each rank the group that it is in"
        )
