"""The state of a run on the disk: written whole or not at all, and read back to go on."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import atomic_file
from bnconvert.errors import BnconvertError, CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bnconvert.finetune.settings import Settings

SCHEMA = 1
EPOCH_COLUMNS = (
    "epoch", "lr", "train_loss", "loss", "top1", "images_per_second", "seconds",
)  # fmt: skip
UPDATE_COLUMNS = ("epoch", "update", "lr", "loss", "images")
CHECKPOINT, SUMMARY, UPDATES, METRICS = (
    "checkpoint.pt",
    "summary.json",
    "updates.csv",
    "metrics.csv",
)


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
        return self.path / CHECKPOINT

    @property
    def summary(self) -> Path:
        """The file that says how the run ended."""
        return self.path / SUMMARY

    @property
    def updates(self) -> Path:
        """The losses of all updates; there from the beginning of a run, as its mark."""
        return self.path / UPDATES

    def check(self, settings: Settings) -> None:
        """Refuse a folder that may not be used; nothing is changed.

        Raises:
            BnconvertError: It is a file; or it holds something, and neither `--resume` nor
                `--force` is given; or `--resume` is, and it holds no run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BnconvertError(f"{self.path}: is a file; name a folder with -o")
        if settings.force or not self._is_used():
            return
        if not settings.resume:
            raise BnconvertError(
                f"{self.path}: is not empty; use --resume to go on with its run, or --force to "
                "start anew"
            )
        if not self.checkpoint.exists() and not self.updates.exists():
            raise BnconvertError(
                f"{self.path}: holds no run to go on with (no {self.checkpoint.name}); name the "
                "folder of a run, or use --force to start one there"
            )

    def _is_used(self) -> bool:
        """Whether the folder holds more than what a killed process was writing."""
        return self.path.is_dir() and any(
            not (entry.name.startswith(".") and entry.suffix == ".tmp")
            for entry in self.path.iterdir()
        )

    def begin(self) -> None:
        """Make the folder, or take away the state of the run that is there."""
        self.path.mkdir(parents=True, exist_ok=True)
        for old in (self.checkpoint, self.summary):
            old.unlink(missing_ok=True)
        _write_csv(self.updates, UPDATE_COLUMNS, [])

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
            schema, saved, recorded = (state[key] for key in ("schema", "settings", "facts"))
            differences = settings.differences(saved)
        except Exception as error:  # a damaged file makes torch raise errors of many kinds
            raise CheckpointError(
                f"{self.checkpoint}: is damaged or no state of a run ({first_line(error)}); start "
                "anew with --force"
            ) from error
        if schema != SCHEMA:
            raise CheckpointError(
                f"{self.checkpoint}: has the schema {schema!r} and not {SCHEMA}; go on "
                "with the bnconvert that wrote it, or start anew with --force"
            )
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
        """Replace the saved state.

        Raises:
            BnconvertError: It cannot be written; the one from before is kept.
        """
        try:
            with atomic_file(self.checkpoint, overwrite=True) as temporary:
                torch.save({"schema": SCHEMA, **state}, temporary)
        except (OSError, RuntimeError) as error:  # torch raises the latter where the disk is full
            raise BnconvertError(
                f"{self.checkpoint}: the state cannot be written ({first_line(error)}); make room "
                "for it and go on with --resume"
            ) from error

    def write_epochs(self, rows: Sequence[Sequence[float]]) -> None:
        """Write `metrics.csv`, one row per epoch."""
        _write_csv(self.path / METRICS, EPOCH_COLUMNS, rows)

    def add_updates(self, rows: Sequence[Sequence[float]], epoch: int) -> None:
        """Add an epoch's rows to `updates.csv`, in place of those that are there from before."""
        kept: list[Sequence[Any]] = []
        if self.updates.exists():
            with self.updates.open(newline="") as file:
                kept = [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) < epoch]
        _write_csv(self.updates, UPDATE_COLUMNS, [*kept, *rows])

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        with atomic_file(self.summary, overwrite=True) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with atomic_file(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
