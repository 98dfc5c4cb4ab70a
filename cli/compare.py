"""`bnconvert compare`: two models or ONNX files on the same inputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bnconvert.cli.output import (
    UsageError,
    images_of_size,
    input_size_option,
    json_option,
    note,
    show,
)

if TYPE_CHECKING:
    from torch import nn


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--checkpoint-a", metavar="FILE", help="Load these weights into A.")
@click.option("--checkpoint-b", metavar="FILE", help="Load these weights into B.")
@click.option("--images", metavar="DIR", help="Compare on the images in this folder.")
@input_size_option
@click.option("--layers", is_flag=True, help="Also show the difference of every layer.")
@click.option(
    "--plot", metavar="FILE", help="Draw the differences of layers into an .svg or .png file."
)
@click.option("--force", is_flag=True, help="Replace an existing picture.")
@click.option(
    "--tolerance",
    type=float,
    default=1e-4,
    show_default=True,
    help="Largest relative difference; above it the exit code is 1.",
)
@json_option
def command(
    a: str,
    b: str,
    checkpoint_a: str | None,
    checkpoint_b: str | None,
    images: str | None,
    input_size: str | None,
    layers: bool,
    plot: str | None,
    force: bool,
    tolerance: float,
    as_json: bool,
) -> None:
    """Compare A and B: each is a MODEL or an ONNX file.

    Both run on the same random inputs, or on the images of a folder prepared as the model wants.
    """
    from bnconvert.comparison import compare
    from bnconvert.export.plot import check_plot, plot_differences

    if force and not plot:
        raise UsageError("--force: there is no --plot to replace; leave it out")
    if images and input_size:
        raise UsageError("--input-size: --images gives the inputs; leave one of them out")
    if plot:
        check_plot(Path(plot), overwrite=force)
    comparison = compare(
        _load(a, checkpoint_a, "--checkpoint-a"),
        _load(b, checkpoint_b, "--checkpoint-b"),
        images_of_size(input_size, 2),
        images=images,
        layers=layers or plot is not None,
    )
    show(comparison, as_json)
    if plot:
        plot_differences(comparison, Path(plot), overwrite=force)
    if not comparison.largest_difference <= tolerance:
        note(f"the models differ by more than --tolerance {tolerance:g}")
        sys.exit(1)


def _load(spec: str, checkpoint: str | None, option: str) -> nn.Module | Path:
    path = Path(spec)
    if path.suffix == ".onnx" or path.is_file():
        if checkpoint:
            raise UsageError(f"{option}: {spec} is an ONNX file with its own weights; leave it out")
        return path
    from bnconvert.models import load_model

    return load_model(spec, checkpoint)
