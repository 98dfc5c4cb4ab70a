"""What folding did: a `Report` with the proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnconvert.report import LayerReport, Outcome, Report

if TYPE_CHECKING:
    from bnconvert.fold.planner import Group
    from bnconvert.fold.proof import Proof


@dataclass(frozen=True)
class FoldReport(Report):
    """What became of each norm, and the measured difference of the folded model.

    Attributes:
        proof: The differences; None when verification was not asked for.
        ways: Number of norms that went "backward", "forward" (of these, "across" an activation),
            "split" and, in graph form, were "merged".
    """

    proof: Proof | None = None
    ways: tuple[tuple[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain types; the proof and the ways are added."""
        proof = None
        if self.proof is not None:
            proof = {"float64": self.proof.float64, "own_dtype": self.proof.own_dtype}
        return {**super().to_dict(), "proof": proof, "ways": dict(self.ways)}

    def __str__(self) -> str:
        """Return the table of layers and a line with the measured differences."""
        text = super().__str__()
        if self.proof is None:
            return f"{text}\n  not verified"
        text += f"\n  largest relative difference: {self.proof.float64:.1e} in float64"
        if self.proof.own_dtype is not None:
            text += f", {self.proof.own_dtype:.1e} in the model's own dtype"
        return text


def layer_report(group: Group, name: str) -> LayerReport:
    """Return the entry of one norm under one of its names."""
    kind = group.type
    if group.move is None:
        return LayerReport(name, kind, Outcome.LEFT, reason=group.reason)
    return LayerReport(name, kind, Outcome.FOLDED, now=_now(group))


def _now(group: Group) -> str:
    assert group.move is not None  # noqa: S101 (asked of folded norms)
    targets = group.targets
    into = ", ".join(targets[:2])
    if len(targets) > 2:
        into += f" and {len(targets) - 2} more"
    way = {
        "backward": "into",
        "forward": "forward into",
        "split": "back and forward into",
        "merged": "with its branches into",
    }
    across = ", across its activation" if group.move.clamps else ""
    return f"{way[group.how]} {into}{across}"


def count_ways(groups: list[Group]) -> tuple[tuple[str, int], ...]:
    """Return how many norms went each way."""
    counts: dict[str, int] = {}
    for group in groups:
        if group.move is not None:
            counts[group.how] = counts.get(group.how, 0) + 1
            if group.move.clamps:
                counts["across"] = counts.get("across", 0) + 1
    return tuple(counts.items())
