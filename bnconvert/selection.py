"""Which layers the user asked for: `include` and `exclude` of every pass."""

from __future__ import annotations

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
        self._by_name = not callable(include)
        self._include = None if include is None else _predicates("include", include)
        self._exclude = [] if exclude is None else _predicates("exclude", exclude)

    def refuse_idle(self, norms: Sequence[Norm]) -> None:
        """Refuse patterns to include of which none matches a layer.

        Raises:
            BnconvertError: Naming what was given and a layer that there is.
        """
        patterns = self._include if self._by_name else None
        if not patterns or not norms or any(self._includes(norm) for norm in norms):
            return
        given = ", ".join(text for text, _ in patterns)
        raise BnconvertError(
            f"include: {given} matches none of the {len(norms)} BatchNorm layers; the first is "
            f"{norms[0].name or 'the model itself, whose name is empty'}, and bnconvert inspect "
            "lists all"
        )

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
