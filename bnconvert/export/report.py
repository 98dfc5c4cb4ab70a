"""What an export did and what was proven about the file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bnconvert.report import SCHEMA, Report, format_table

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.comparison.runners import RuntimeLevel


@dataclass(frozen=True)
class Check:
    """One run of the file in onnxruntime against the torch model, on the same inputs.

    All differences are max|a - b| / max|b| over each output, the largest of the outputs.

    Attributes:
        batch: Batch size.
        size: Height and width, where `dynamic_size` was proven; None is the example's own.
        level: How far onnxruntime rewrote the graph.
        difference: File against the torch model in float32.
        from_float64: File against the torch model in float64; None where that does not run.
        rounding: The torch model in float32 against itself in float64: what rounding alone does.
    """

    batch: int
    size: tuple[int, int] | None
    level: RuntimeLevel
    difference: float
    from_float64: float | None
    rounding: float | None


@dataclass(frozen=True)
class ExportReport:
    """The result of `export_onnx`; `str()` is its table.

    Attributes:
        files: Written files and their sizes in bytes, the model first.
        opset: Version of the ONNX operator set of the file.
        fold: What happened to each BatchNorm layer; None without folding.
        captured: Number of operations by name in the program captured from the model.
        nodes: Number of nodes by type in the file.
        checks: One run per batch size and runtime level.
        tolerance: Largest `Check.difference` that was accepted.
        notes: What else a reader must know, a sentence each.
    """

    files: dict[Path, int]
    opset: int
    fold: Report | None
    captured: dict[str, int]
    nodes: dict[str, int]
    checks: tuple[Check, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def largest_difference(self) -> float:
        """The largest difference from the torch model in float32 over all checks."""
        return max(check.difference for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, ready for JSON."""
        return {
            "schema": SCHEMA,
            "files": {str(path): size for path, size in self.files.items()},
            "opset": self.opset,
            "fold": self.fold.to_dict() if self.fold else None,
            "captured": self.captured,
            "nodes": self.nodes,
            "tolerance": self.tolerance,
            "checks": [{**asdict(c), "level": c.level.value} for c in self.checks],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        left = self.nodes.get("BatchNormalization", 0)
        lines = [f"{path}: {size:,} bytes" for path, size in self.files.items()]
        lines.append(
            f"opset {self.opset}; {sum(self.captured.values())} operations captured, "
            f"{sum(self.nodes.values())} nodes in the file, {left} BatchNormalization"
        )
        if self.fold:
            lines.append(str(self.fold))
        lines.append(f"verified in onnxruntime, tolerance {self.tolerance:.1e}:")
        lines += format_table([_HEADER, *map(_row, self.checks)])
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


_HEADER = ("batch", "level", "from float32", "from float64", "torch's own rounding")


def _row(check: Check) -> tuple[str, ...]:
    size = " x {}x{}".format(*check.size) if check.size else ""
    return (
        f"{check.batch}{size}",
        check.level.value,
        f"{check.difference:.1e}",
        _number(check.from_float64),
        _number(check.rounding),
    )


def _number(value: float | None) -> str:
    return "not available" if value is None else f"{value:.1e}"
