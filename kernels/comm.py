"""The two collectives of a synchronised layer: one sum over the ranks each way.

A process group is named by its string in torch's registry, which operators can take as an argument
and `torch.compile` as a constant; "" is the default group.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Iterator


_forced = 0
"""How many `forced` blocks are open."""


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group registered under a name; "" is the default group."""
    if not name:
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("the default process group has not been initialized")
        return world
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: dist.ProcessGroup = resolve(name)
    return found


def group_size(name: str) -> int:
    """Return the number of ranks in the group; 1 where torch.distributed is not initialized.

    Raises:
        RuntimeError: No group of this name exists any more.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(resolve_group(name))


def communicates(name: str) -> bool:
    """Whether a layer of the group exchanges statistics: it has peers, or `forced` says so.

    Raises:
        RuntimeError: No group of this name exists any more.
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
