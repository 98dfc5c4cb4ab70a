"""The state of a run on the disk: written whole or not at all, and read back to go on."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import atomic_file
from bnconvert.errors import BnconvertError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bnconvert.finetune.settings import Settings

SCHEMA = 1
EPOCH_COLUMNS = (
    "epoch", "lr", "train_loss", "loss", "top1", "images_per_second", "seconds",
)  # fmt: skip
UPDATE_COLUMNS = ("epoch", "update", "lr", "loss", "images")


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        epoch: Number of finished epochs.
        update: Number of finished updates of the epoch after those.
        updates: Loss and so on of these updates, in `UPDATE_COLUMNS`.
        epochs: Results of the finished epochs, in `EPOCH_COLUMNS`.
        seconds: Seconds that the unfinished epoch took so far.
    """

    epoch: int = 0
    update: int = 0
    updates: list[list[float]] = field(default_factory=list)
    epochs: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0


class RunFolder:
    """The output folder of a run.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        """The file that a run goes on from."""
        return self.path / "checkpoint.pt"

    @property
    def summary(self) -> Path:
        """The file that says how the run ended."""
        return self.path / "summary.json"

    def open(self, settings: Settings) -> None:
        """Make the folder, or check that the one there may be used.

        Raises:
            BnconvertError: The folder is in use by another run or model and neither `--resume` nor
                `--force` is given.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BnconvertError(f"{self.path}: is a file; name a folder with -o")
        used = self.path.is_dir() and any(self.path.iterdir())
        if used and not settings.resume and not settings.force:
            raise BnconvertError(
                f"{self.path}: is not empty; use --resume to go on with its run, or --force to "
                "start anew"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        if settings.force:
            for old in (self.checkpoint, self.summary, self.path / "updates.csv"):
                old.unlink(missing_ok=True)

    def load(self, settings: Settings, facts: dict[str, Any]) -> dict[str, Any] | None:
        """Return the saved state, or None where the run was stopped before the first was saved.

        Args:
            settings: Must be those of the saved run where they matter.
            facts: Further values that must be as they were, by name.

        Raises:
            BnconvertError: The state is damaged, or is of another run.
        """
        if not self.checkpoint.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(
                self.checkpoint, map_location="cpu", weights_only=True
            )
            differences = settings.differences(state["settings"])
            recorded = state["facts"]
        except Exception as error:  # a damaged file makes torch raise errors of many kinds
            raise CheckpointError(
                f"{self.checkpoint}: is damaged or no state of a run ({error}); start anew with "
                "--force"
            ) from error
        differences += [
            f"{name} was {recorded.get(name)!r} and is {value!r}"
            for name, value in facts.items()
            if recorded.get(name) != value
        ]
        if differences:
            raise BnconvertError(
                f"--resume: {'; '.join(differences)}; give the settings of the run, or start anew "
                "with --force"
            )
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state."""
        with atomic_file(self.checkpoint, overwrite=True) as temporary:
            torch.save({"schema": SCHEMA, **state}, temporary)

    def write_epochs(self, rows: Sequence[Sequence[float]]) -> None:
        """Write `metrics.csv`, one row per epoch."""
        _write_csv(self.path / "metrics.csv", EPOCH_COLUMNS, rows)

    def add_updates(self, rows: Sequence[Sequence[float]], epoch: int) -> None:
        """Add an epoch's rows to `updates.csv`, in place of those that are there from before."""
        path = self.path / "updates.csv"
        kept: list[Sequence[Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) < epoch]
        _write_csv(path, UPDATE_COLUMNS, [*kept, *rows])

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        with atomic_file(self.summary, overwrite=True) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with atomic_file(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
