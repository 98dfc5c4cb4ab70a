"""The two collectives of a synchronised layer: one sum over the ranks each way.

A process group is named by a string, which operators can take as an argument and `torch.compile` as
a constant; "" is the default group. It is the group's name in torch's registry, as long as that
means one group: torch counts names anew after `destroy_process_group`.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Iterator


_forced = 0
"""How many `forced` blocks are open."""


_named: dict[str, weakref.ref[dist.ProcessGroup]] = {}


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name by which operators find a group, for as long as the group exists."""
    base = name = str(group.group_name)
    generations = itertools.count(1)
    while (known := _named[name]() if name in _named else None) not in (None, group):
        name = f"{base}#{next(generations)}"
    if known is None:
        _named[name] = weakref.ref(group)
    return name


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name; "" is the default group.

    Raises:
        BnconvertError: The group was destroyed.
    """
    if not name:
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("the default process group has not been initialized")
        return world
    group = _named[name]() if name in _named else None
    if group is not None:
        ranks_of(group)
        return group
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: dist.ProcessGroup = resolve(name)
    return found


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group; None is the default group.

    Raises:
        BnconvertError: The group was destroyed.
    """
    try:
        return dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise BnconvertError(
            "process_group: the group of a synchronised layer was destroyed; set the layer's "
            "process_group, or convert the model again, after init_process_group"
        ) from error


def group_size(name: str) -> int:
    """Return the number of ranks in the group; 1 where torch.distributed is not initialized.

    Raises:
        BnconvertError: The group was destroyed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(resolve_group(name))


def communicates(name: str) -> bool:
    """Whether a layer of the group exchanges statistics: it has peers, or `forced` says so.

    Raises:
        BnconvertError: The group was destroyed.
    """
    return _forced > 0 or group_size(name) > 1


# What torch.compiler.assume_constant_result sets; calling it would import torch._dynamo, which
# takes as long as torch itself.
communicates._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def forced() -> Iterator[None]:
    """Make layers synchronise in a group of one rank too, to test and measure what that does."""
    global _forced
    _forced += 1
    try:
        yield
    finally:
        _forced -= 1


def all_reduce_(buffer: Tensor, name: str) -> None:
    """Add the buffers of all ranks of the group, in place."""
    group = resolve_group(name)
    if buffer.is_cuda and dist.get_backend(group) == "gloo":
        staged = buffer.cpu()
        dist.all_reduce(staged, group=group)
        buffer.copy_(staged)
    else:
        dist.all_reduce(buffer, group=group)
