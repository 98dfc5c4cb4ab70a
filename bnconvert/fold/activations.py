"""Activations that limit their input to a range, which folding can turn into per-channel clamps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnconvert.fold.graph import operation

if TYPE_CHECKING:
    from torch import fx


def limits_of(node: fx.Node) -> tuple[float, float] | None:
    """Return the range that the operation limits its input to, or None for any other operation."""
    name = operation(node)
    if name == "relu":
        return 0.0, math.inf
    if name == "relu6":
        return 0.0, 6.0
    arguments = [*node.args[1:], None, None]
    if name == "hardtanh":
        low = arguments[0] if len(node.args) > 1 else node.kwargs.get("min_val", -1.0)
        high = arguments[1] if len(node.args) > 2 else node.kwargs.get("max_val", 1.0)
        return _bounds(low, high)
    if name == "clamp":
        low = arguments[0] if len(node.args) > 1 else node.kwargs.get("min")
        high = arguments[1] if len(node.args) > 2 else node.kwargs.get("max")
        return _bounds(low, high)
    if name == "clamp_min":
        return _bounds(arguments[0], None)
    return _bounds(None, arguments[0]) if name == "clamp_max" else None


def _bounds(low: object, high: object) -> tuple[float, float] | None:
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)) or low > high:
        return None
    return float(low), float(high)
