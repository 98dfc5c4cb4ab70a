"""`bnconvert recalibrate`: running statistics anew, from images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bnconvert.cli.output import (
    exit_if_left,
    json_option,
    model_argument,
    note,
    output_options,
    show,
    strict_option,
)
from bnconvert.cli.progress import steps

if TYPE_CHECKING:
    from bnconvert.recalibration.recalibrate import Estimator


@click.command("recalibrate")
@model_argument
@click.option(
    "--data",
    metavar="DIR",
    required=True,
    help="Images by class (the training images of what finetune takes), or a timm dataset name.",
)
@click.option("--data-root", metavar="DIR", help="Where a timm dataset lies.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Images per batch.",
)
@click.option("--num-batches", type=click.IntRange(1), help="Batches to use. [default: all images]")
@click.option("--img-size", type=click.IntRange(1), help="Height and width. [default: the model's]")
@click.option(
    "--estimator",
    type=click.Choice(["population", "mean_of_batches"]),
    default="population",
    show_default=True,
    help="Exact statistics layer by layer, or averages over batches as in training.",
)
@click.option("--skip-bad-images", is_flag=True, help="Leave out images that cannot be read.")
@output_options("model folder")
@strict_option
@json_option
def command(
    model: str,
    checkpoint: str | None,
    output: str,
    force: bool,
    dry_run: bool,
    strict: bool,
    as_json: bool,
    num_batches: int | None,
    estimator: Estimator,
    **data: Any,
) -> None:
    """Recalibrate the running statistics of MODEL on images, and save it.

    The images are prepared as for validation, and come in an order that does not depend on their
    classes.
    """
    from bnconvert.finetune.recalibration import open_loader
    from bnconvert.models import check_output, load_model, save_model
    from bnconvert.recalibration.recalibrate import recalibrate_batchnorm

    if not dry_run:
        check_output(output, overwrite=force)
    network = load_model(model, checkpoint)
    loader, skipped = open_loader(network, num_batches=num_batches, **data)
    for path in skipped:
        note(f"{path}: cannot be read and is left out")
    with steps("recalibrating") as progress:
        report = recalibrate_batchnorm(
            network, loader, num_batches=num_batches, estimator=estimator, progress=progress
        )
    if not dry_run:
        save_model(network, output, overwrite=force)
    show(report, as_json)
    exit_if_left(report, strict)
