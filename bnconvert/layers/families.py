"""Norm families: which mixin makes layers that run a given `forward` synchronised, or frozen.

A family is named by its `forward` function. A subclass that does not override `forward` belongs to
the family of its base, whatever else it changes; one that overrides it does not, and is unknown.
To add a family, write its mixins, register them here from their own file, and import that file in
`_import_families_in_use`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

SYNC_MIXINS: dict[Callable[..., Any], type[nn.Module]] = {}
"""forward -> the mixin that makes its layers synchronised."""

FROZEN_MIXINS: dict[Callable[..., Any], type[nn.Module]] = {}
"""forward -> the mixin that makes its layers frozen."""

_FAMILY_OF_LIBRARY = {"timm.layers.norm_act": "bnconvert.layers.timm_act"}
"""A module of another library -> ours for it, imported when the other is loaded."""


def sync_mixin(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the mixin for layers of this class, or None where its `forward` is unknown."""
    _import_families_in_use()
    return SYNC_MIXINS.get(cls.forward)


def frozen_mixin(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the mixin that freezes layers of this class, or None where `forward` is unknown."""
    _import_families_in_use()
    return FROZEN_MIXINS.get(cls.forward)


def _import_families_in_use() -> None:
    for library, ours in _FAMILY_OF_LIBRARY.items():
        if library in sys.modules and ours not in sys.modules:
            importlib.import_module(ours)
