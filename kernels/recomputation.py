"""Forward passes that activation checkpointing repeats, and which of the two counts a batch.

Mostly the first one does, so that the one inside the backward must not. Some implementations
(fairscale's) set `track_running_stats` to False for the first one, to have plain BatchNorm count
once: then the repeated one does.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class _Local(threading.local):
    counting = False


_local = _Local()
_uncounted: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def is_recomputation() -> bool:
    """Whether this runs inside a backward and the batch was counted before.

    Code that is being compiled cannot tell.
    """
    if torch.compiler.is_compiling() or _local.counting:
        return False
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def counting() -> Iterator[None]:
    """Have `is_recomputation` say no."""
    before, _local.counting = _local.counting, True
    try:
        yield
    finally:
        _local.counting = before


def counts_late(layer: Any) -> bool:
    """Whether this forward of a layer repeats one that did not track statistics, and tracks them.

    Has to be asked once in every training forward, because it remembers those that did not track.
    """
    if torch.compiler.is_compiling() or layer.running_mean is None:
        return False
    if is_recomputation():
        waiting = _uncounted.get(layer, 0) if layer.track_running_stats else 0
        if waiting:
            _uncounted[layer] = waiting - 1
        return waiting > 0
    if not layer.track_running_stats:
        _uncounted[layer] = _uncounted.get(layer, 0) + 1
    return False
