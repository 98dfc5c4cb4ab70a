"""`bnconvert compare`: two models or ONNX files on the same inputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bnconvert.cli.output import json_option, show

if TYPE_CHECKING:
    from torch import nn


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--checkpoint-a", metavar="FILE", help="Load these weights into A.")
@click.option("--checkpoint-b", metavar="FILE", help="Load these weights into B.")
@click.option("--images", metavar="DIR", help="Compare on the images in this folder.")
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
    tolerance: float,
    as_json: bool,
) -> None:
    """Compare A and B: each is a MODEL or an ONNX file.

    Both run on the same random inputs, or on the images of a folder prepared as the model wants.
    """
    from bnconvert.comparison import compare

    comparison = compare(_load(a, checkpoint_a), _load(b, checkpoint_b), images=images)
    show(comparison, as_json)
    if not comparison.largest_difference <= tolerance:
        sys.exit(1)


def _load(spec: str, checkpoint: str | None) -> nn.Module | Path:
    path = Path(spec)
    if path.suffix == ".onnx" or (path.is_file() and not path.is_dir()):
        return path
    from bnconvert.models import load_model

    return load_model(spec, checkpoint)
