"""Progress and remarks on stderr, from rank 0."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import click

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bar(Protocol):
    """A progress bar of one epoch."""

    def advance(self, images: int) -> None:
        """Count images that were trained on."""


class _NoBar:
    def advance(self, images: int) -> None:
        """Show nothing."""


class Console:
    """Shows progress: a bar on a terminal, and remarks anywhere.

    Attributes:
        epochs: Number of epochs, for the bar's label.
    """

    def __init__(self, *, shown: bool, epochs: int) -> None:
        self._shown = shown
        self.epochs = epochs

    def note(self, text: str) -> None:
        """Show a remark."""
        if self._shown:
            click.echo(text, err=True)

    @contextmanager
    def epoch(self, epoch: int, images: int) -> Iterator[Bar]:
        """Show the bar of an epoch, with images per second and the remaining time."""
        if not self._shown or not sys.stderr.isatty():
            yield _NoBar()
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
            task = progress.add_task(f"epoch {epoch + 1}/{self.epochs}", total=images, rate="")

            class _RichBar:
                def advance(self, images: int) -> None:
                    progress.advance(task, images)
                    speed = progress.tasks[0].speed
                    progress.update(task, rate=f"{speed:.0f} images/s" if speed else "")

            yield _RichBar()
