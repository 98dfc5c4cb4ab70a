"""Draw how the difference of two models grows with depth."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from bnconvert.errors import BnconvertError
from bnconvert.export.files import check_destination, staged

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.comparison import Comparison

_SUFFIXES = (".svg", ".png")
_SMALLEST = 1e-12  # where equal layers are drawn on the logarithmic axis


def check_plot(path: Path, *, overwrite: bool) -> None:
    """Refuse a picture that cannot be drawn, before any work is done.

    Raises:
        BnconvertError: The suffix is another, matplotlib is not installed, or the destination is
            refused.
    """
    if path.suffix not in _SUFFIXES:
        raise BnconvertError(f"{path}: is not a {' or '.join(_SUFFIXES)} file; rename it")
    if importlib.util.find_spec("matplotlib") is None:
        raise BnconvertError("plot: needs matplotlib; pip install 'bnconvert[plot]'")
    check_destination(path, overwrite)


def plot_differences(comparison: Comparison, path: Path, *, overwrite: bool = False) -> None:
    """Write a picture of the relative difference of each layer, in the order of execution.

    Args:
        comparison: Made with `layers=True`.
        path: The picture to write; its suffix, .svg or .png, is its format.
        overwrite: Replace an existing file.

    Raises:
        BnconvertError: No layer was compared, or see `check_plot`.
    """
    check_plot(path, overwrite=overwrite)
    if not comparison.layers:
        raise BnconvertError("plot: no layer is in both models; there is nothing to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    depth = range(len(comparison.layers))
    values = [max(layer.relative, _SMALLEST) for layer in comparison.layers]
    axes.semilogy(depth, values, marker=".", linewidth=1)
    axes.set_xlabel("layers in the order of execution")
    axes.set_ylabel("largest relative difference")
    axes.set_title(f"{comparison.a} against {comparison.b}")
    axes.grid(visible=True, which="major", alpha=0.3)
    step = max(1, len(values) // 20)
    names = [layer.name for layer in comparison.layers]
    axes.set_xticks(list(depth)[::step], names[::step], rotation=60, ha="right", fontsize=7)
    with staged(path, overwrite) as file:
        figure.savefig(file, format=path.suffix[1:])
