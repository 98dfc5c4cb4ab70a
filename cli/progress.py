"""Progress bars on stderr, shown on a terminal only."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def steps(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs.

    Args:
        label: What is being done.

    Yields:
        A function to call with the number of finished steps and of all, 0 where that is unknown.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
