"""`bnconvert fold`: a model folder with BatchNorm folded into the layers around it."""

from __future__ import annotations

import click

from bnconvert.cli.output import (
    exit_if_left,
    images_of_size,
    input_size_option,
    json_option,
    model_argument,
    output_options,
    selection_options,
    show,
    strict_option,
)


@click.command("fold")
@model_argument
@output_options("model folder")
@selection_options
@input_size_option
@click.option("--clone-shared", is_flag=True, help="Copy modules that stand under several names.")
@click.option(
    "--keep-activations", is_flag=True, help="Never turn a ReLU into a clamp per channel."
)
@click.option("--no-verify", is_flag=True, help="Do not compare with the model in float64.")
@click.option("--time", "timed", is_flag=True, help="Measure the latency before and after.")
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
    input_size: str | None,
    clone_shared: bool,
    keep_activations: bool,
    no_verify: bool,
    timed: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Fold the BatchNorm layers of MODEL exactly, and write a model folder.

    The folded model is compared with the original in float64; when the numbers differ, nothing is
    written and the exit code is 1. The table says where each layer went, or why it stayed.
    """
    from bnconvert import load_model, plan_fold_batchnorm, save_model
    from bnconvert.arguments import make_arguments
    from bnconvert.fold.mirror import mirror
    from bnconvert.fold.summary import FoldSummary, measure_latency, measure_size
    from bnconvert.models import check_output

    check_output(output, overwrite=force)
    loaded = load_model(model, checkpoint).eval()
    images = make_arguments(loaded, images_of_size(input_size, 2)).tensors[0]
    plan = plan_fold_batchnorm(
        loaded,
        images,
        include=include or None,
        exclude=exclude or None,
        clone_shared=clone_shared,
        rewrite_activations=not keep_activations,
        verify=not no_verify,
    )
    before, original = measure_size(loaded), mirror(loaded) if timed else None
    folded = plan.apply()
    latency = measure_latency(original, folded, images) if original is not None else None
    summary = FoldSummary(plan.report, before, measure_size(folded), latency, len(images))
    if not dry_run:
        save_model(folded, output, overwrite=force)
    show(summary, as_json)
    exit_if_left(plan.report, strict)
