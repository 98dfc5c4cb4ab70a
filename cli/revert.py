"""`bnconvert revert`: a model folder whose synchronised layers are plain BatchNorm again."""

from __future__ import annotations

import click

from bnconvert.cli.output import (
    exit_if_left,
    json_option,
    model_argument,
    output_options,
    selection_options,
    show,
    strict_option,
)


@click.command("revert")
@model_argument
@output_options("model folder")
@selection_options
@click.option(
    "--input-size",
    nargs=3,
    type=click.IntRange(min=1),
    metavar="C H W",
    help="Image to run the model on, where a layer of another library does not tell whether it is "
    "1d, 2d or 3d. [default: the model's own, from timm]",
)
@strict_option
@json_option
def command(
    model: str,
    checkpoint: str | None,
    output: str,
    force: bool,
    dry_run: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    input_size: tuple[int, int, int] | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Make the synchronised BatchNorm layers of MODEL plain and write a model folder."""
    from bnconvert import load_model, plan_revert_sync_batchnorm, save_model
    from bnconvert.arguments import input_size as timm_input_size
    from bnconvert.arguments import random_images
    from bnconvert.models import check_output

    check_output(output, overwrite=force)
    loaded = load_model(model, checkpoint)
    size: tuple[int, ...] | None = input_size
    if size is None and getattr(loaded, "pretrained_cfg", None):
        size = timm_input_size(loaded)
    plan = plan_revert_sync_batchnorm(
        loaded,
        example_inputs=None if size is None else random_images(size, 2),
        include=include or None,
        exclude=exclude or None,
    )
    if not dry_run:
        save_model(plan.apply(), output, overwrite=force)
    show(plan.report, as_json)
    exit_if_left(plan.report, strict)
