"""Giving each name of a shared module a module of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from bnconvert.fold.edits import Separate
from bnconvert.layers.kinds import kind_of

if TYPE_CHECKING:
    from bnconvert.fold.edits import TreeEdit

FOLDED_INTO = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers that take norms in."""

CLAMPED = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
"""Activation layers that can become clamps."""


def separate_shared(root: nn.Module) -> list[TreeEdit]:
    """Separate, in place, the modules that stand under several names and matter to folding.

    Args:
        root: A mirror of the model.

    Returns:
        The edits that were made, in their order.
    """
    edits: list[TreeEdit] = []
    while (name := _next_shared(root)) is not None:
        edit = Separate(name)
        edit.apply(root)
        edits.append(edit)
    return edits


def _next_shared(root: nn.Module) -> str | None:
    """Return the second name of the outermost shared module, or None when all have one name."""
    seen: set[int] = set()
    for name, module in _edges(root, "", set()):
        if id(module) in seen and _matters(module):
            return name
        seen.add(id(module))
    return None


def _edges(module: nn.Module, prefix: str, visited: set[int]) -> list[tuple[str, nn.Module]]:
    """Return every (name, child) edge once, parents before their children."""
    if id(module) in visited:
        return []
    visited.add(id(module))
    edges = []
    for name, child in module._modules.items():
        if child is not None:
            edges.append((f"{prefix}{name}", child))
            edges += _edges(child, f"{prefix}{name}.", visited)
    return edges


def _matters(module: nn.Module) -> bool:
    return any(
        isinstance(child, (*FOLDED_INTO, *CLAMPED)) or kind_of(child) is not None
        for child in module.modules()
    )
