"""Which layers the user asked for: `include` and `exclude` of every pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bnconvert.walk import Norm

Predicate = Callable[[str, nn.Module], bool]
Patterns = str | Iterable[str] | Predicate
"""fnmatch patterns on qualified names ("layer4.*"), or a function of the name and the module."""


class Selection:
    """Decides per layer; a layer with several names is matched by any of them."""

    def __init__(self, include: Patterns | None, exclude: Patterns | None) -> None:
        self._include = None if include is None else _predicates("include", include)
        self._exclude = [] if exclude is None else _predicates("exclude", exclude)
        self._patterns = {
            argument: given or []
            for argument, own, given in (
                ("include", include, self._include),
                ("exclude", exclude, self._exclude),
            )
            if not callable(own)
        }

    def refuse_idle(self, norms: Sequence[Norm]) -> None:
        """Refuse patterns to include of which none matches a layer, and warn of other idle ones.

        Raises:
            BnconvertError: Naming what was given and a layer that there is.
        """
        if not norms:
            return
        there_are = (
            f"none of the {len(norms)} BatchNorm layers; the first is "
            f"{norms[0].name or 'the model itself, whose name is empty'}, and bnconvert inspect "
            "lists all"
        )
        included = self._patterns.get("include")
        if included and not any(self._includes(norm) for norm in norms):
            given = ", ".join(text for text, _ in included)
            raise BnconvertError(f"include: {given} matches {there_are}")
        for argument, patterns in self._patterns.items():
            for text, matches in patterns:
                if not any(matches(name, norm.module) for norm in norms for name in norm.names):
                    warnings.warn(f"{argument}: {text} matches {there_are}", stacklevel=4)

    def _includes(self, norm: Norm) -> bool:
        return self._include is None or any(
            matches(name, norm.module) for _, matches in self._include for name in norm.names
        )

    def why_not(self, norm: Norm) -> str:
        """Return why a layer is not selected, as a sentence; "" for a selected layer."""
        for text, matches in self._exclude:
            if any(matches(name, norm.module) for name in norm.names):
                return f"it is excluded by {text}"
        return "" if self._includes(norm) else "it is not among the included layers"


def _predicates(argument: str, patterns: Patterns) -> list[tuple[str, Predicate]]:
    if isinstance(patterns, str):
        patterns = [patterns]
    if callable(patterns):
        return [("the given function", patterns)]
    found = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    for pattern in found:
        if not isinstance(pattern, str):
            raise BnconvertError(
                f"{argument}: expected fnmatch patterns on names, or a function of name and "
                f"module, got {pattern!r}"
            )
    return [(repr(pattern), named_like(pattern)) for pattern in found]


def named_like(pattern: str) -> Predicate:
    """Return a function of name and module that tells whether the name matches a pattern."""
    return lambda name, module: fnmatchcase(name, pattern)
