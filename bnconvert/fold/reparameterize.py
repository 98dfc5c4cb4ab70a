"""Blocks that know how to become one convolution: timm's `reparameterize` and `fuse` methods.

A module tree cannot express the merge of branches that `bnconvert.fold.merge` does in a graph, but
some blocks can do it to themselves. Their methods are tried where a norm would otherwise stay, on
float64 mirrors, and used only when the proof passes with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.fold.edits import Reparameterize
from bnconvert.fold.hooks import user_hook
from bnconvert.walk import Tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

METHODS = ("reparameterize", "fuse", "switch_to_deploy")
"""What the methods are called."""


def find_blocks(model: nn.Module, left: Iterable[str], kept: set[str]) -> list[Reparameterize]:
    """Return the innermost blocks that can merge their branches, each holding a norm that is left.

    Args:
        model: The model.
        left: Names of norms that ordinary folding leaves.
        kept: Names of norms that must not change; their blocks are not touched.
    """
    tree = Tree(model)
    found: dict[str, str] = {}
    for name in left:
        block = _innermost(model, name)
        if block is not None and _may_change(model, tree, block, kept):
            found[block] = _method(model.get_submodule(block))
    outer = [name for name in found if not any(_inside(name, other) for other in found)]
    return [Reparameterize(name, found[name]) for name in outer]


def _innermost(model: nn.Module, name: str) -> str | None:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        block = ".".join(parts[:length])
        if _method(model.get_submodule(block)):
            return block
    return None


def _method(module: nn.Module) -> str:
    """Return the name of the method by which a block of timm merges its branches, or ""."""
    if not type(module).__module__.startswith("timm."):
        return ""
    return next((name for name in METHODS if callable(getattr(module, name, None))), "")


def _may_change(model: nn.Module, tree: Tree, block: str, kept: set[str]) -> bool:
    """Whether nothing in a block is shared, seen by a user's hook, or to be kept."""
    modules = list(model.get_submodule(block).modules())
    shared = any(len(tree.names(module)) > 1 for module in modules)
    hooked = any(user_hook(module) for module in modules)
    return not shared and not hooked and not any(_inside(name, block) for name in kept)


def _inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")
