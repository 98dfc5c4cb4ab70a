"""Loss and accuracy against epochs, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bnconvert.checkpoint import atomic_file

if TYPE_CHECKING:
    from collections.abc import Sequence


def draw(path: str, epochs: Sequence[Sequence[float]]) -> None:
    """Draw the curves of a run.

    Args:
        path: File to write, `.svg` or `.png`; an existing one is replaced.
        epochs: Rows of `state.EPOCH_COLUMNS`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = [row[0] for row in epochs]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, accuracy = figure.subplots(1, 2)
    losses.plot(numbers, [row[2] for row in epochs], marker=".", label="training")
    losses.plot(numbers, [row[3] for row in epochs], marker=".", label="validation")
    losses.set(xlabel="epoch", ylabel="loss")
    losses.legend()
    accuracy.plot(numbers, [100 * row[4] for row in epochs], marker=".", color="tab:green")
    accuracy.set(xlabel="epoch", ylabel="top-1 of the validation images, %")
    with atomic_file(path, overwrite=True) as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:], dpi=150)
