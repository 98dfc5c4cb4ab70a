"""Which layers the user asked for: `include` and `exclude` of every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from bnconvert.walk import Norm

Predicate = Callable[[str, nn.Module], bool]
Patterns = str | Iterable[str] | Predicate
"""fnmatch patterns on qualified names ("layer4.*"), or a function of the name and the module."""


class Selection:
    """Decides per layer; a layer with several names is matched by any of them."""

    def __init__(self, include: Patterns | None, exclude: Patterns | None) -> None:
        self._include = None if include is None else _predicates(include)
        self._exclude = [] if exclude is None else _predicates(exclude)

    def why_not(self, norm: Norm) -> str:
        """Return why a layer is not selected, as a sentence; "" for a selected layer."""
        for text, matches in self._exclude:
            if any(matches(name, norm.module) for name in norm.names):
                return f"it is excluded by {text}"
        if self._include is not None and not any(
            matches(name, norm.module) for _, matches in self._include for name in norm.names
        ):
            return "it is not among the included layers"
        return ""


def _predicates(patterns: Patterns) -> list[tuple[str, Predicate]]:
    if isinstance(patterns, str):
        patterns = [patterns]
    if callable(patterns):
        return [("the given function", patterns)]
    return [(repr(pattern), _matcher(pattern)) for pattern in patterns]


def _matcher(pattern: str) -> Predicate:
    return lambda name, module: fnmatchcase(name, pattern)
