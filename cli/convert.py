"""`bnconvert convert`: a model folder whose BatchNorm layers are synchronised."""

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


@click.command("convert")
@model_argument
@output_options("model folder")
@selection_options
@click.option(
    "--on-unknown",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What to do about layers that look like BatchNorm and run other code.",
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
    on_unknown: str,
    strict: bool,
    as_json: bool,
) -> None:
    """Make the BatchNorm layers of MODEL synchronised and write a model folder.

    The weights are those of MODEL; the folder records which layers are synchronised.
    """
    from bnconvert import load_model, plan_convert_sync_batchnorm, save_model
    from bnconvert.models import check_output

    check_output(output, overwrite=force)
    loaded = load_model(model, checkpoint)
    plan = plan_convert_sync_batchnorm(
        loaded,
        include=include or None,
        exclude=exclude or None,
        on_unknown=on_unknown,  # type: ignore[arg-type]
    )
    if not dry_run:
        save_model(plan.apply(), output, overwrite=force)
    show(plan.report, as_json)
    exit_if_left(plan.report, strict)
