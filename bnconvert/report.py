"""What a pass did to each layer, and why it left the others.

A pass returns one `Report`; it holds one `LayerReport` per qualified name of every layer that the
pass considered. Printing a report gives a table with the layers that were left last.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, replace
from typing import Any

SCHEMA = 1


class Outcome(str, enum.Enum):
    """What happened to a layer."""

    CONVERTED = "converted"
    REVERTED = "reverted"
    FROZEN = "frozen"
    UNFROZEN = "unfrozen"
    FOLDED = "folded"
    REWRITTEN = "rewritten"
    LEFT = "left"
    SHARED = "shared"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class LayerReport:
    """What happened to one layer under one of its names.

    Attributes:
        name: Qualified name in the model; "" is the model itself.
        type: Class name of the layer before the pass.
        outcome: What was done.
        now: What the layer is now, or what it went into.
        reason: Why the layer was left, as a sentence with the value that decided; "" otherwise.
        error: Largest difference of the layer's result, where the pass measured it.
    """

    name: str
    type: str
    outcome: Outcome
    now: str = ""
    reason: str = ""
    error: float | None = None


@dataclass(frozen=True)
class Report:
    """All layers that one pass, or several passes added together, considered.

    Attributes:
        pass_name: Name of the pass, such as "convert".
        layers: One entry per layer and name, in the order of the model.
    """

    pass_name: str
    layers: tuple[LayerReport, ...] = ()

    def count(self, outcome: Outcome) -> int:
        """Return the number of entries with this outcome."""
        return sum(layer.outcome is outcome for layer in self.layers)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """The layers that the pass did not change, each with its reason."""
        return tuple(layer for layer in self.layers if layer.outcome is Outcome.LEFT)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain types, ready for JSON; `schema` changes with its shape."""
        return {
            "schema": SCHEMA,
            "pass": self.pass_name,
            "counts": {o.value: self.count(o) for o in Outcome if self.count(o)},
            "layers": [{**asdict(layer), "outcome": layer.outcome.value} for layer in self.layers],
        }

    def __add__(self, other: Report) -> Report:
        name = self.pass_name if self.pass_name == other.pass_name else ""
        return Report(name or f"{self.pass_name} + {other.pass_name}", self.layers + other.layers)

    def __str__(self) -> str:
        """Return a table: the changed layers grouped by type and result, the left ones last."""
        counts = ", ".join(f"{self.count(o)} {o}" for o in Outcome if self.count(o))
        lines = [f"{self.pass_name}: {counts or 'no BatchNorm layer found'}"]
        rows = [row for _, row in sorted(enumerate(_grouped(self.layers)), key=_left_last)]
        lines += format_table(rows)
        return "\n".join(lines)


def _left_last(item: tuple[int, tuple[str, ...]]) -> tuple[bool, int]:
    return item[1][2] == Outcome.LEFT.value, item[0]


def _grouped(layers: tuple[LayerReport, ...]) -> list[tuple[str, ...]]:
    """Merge entries that differ in name alone: "layer1.0.bn1 and 5 more"."""
    groups: dict[LayerReport, list[str]] = {}
    for layer in layers:
        groups.setdefault(replace(layer, name=""), []).append(layer.name or "(the model)")
    rows: list[tuple[str, ...]] = []
    for key, names in groups.items():
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        error = "" if key.error is None else f"{key.error:.1e}"
        rows.append((name, key.type, key.outcome.value, key.reason or key.now, error))
    return rows


def format_table(rows: list[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Return the rows as lines with aligned columns.

    Args:
        rows: Cells of each row; every row has as many as the first.
        indent: Text put before every line.
    """
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(indent + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows]
