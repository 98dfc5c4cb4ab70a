"""`bnconvert export`: a model as a verified ONNX file."""

from __future__ import annotations

import click

from bnconvert.cli.output import json_option, model_argument, show


@click.command("export")
@model_argument
@click.option("-o", "--output", metavar="FILE", required=True, help="The ONNX file to write.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--opset", type=int, help="Version of the ONNX operator set. [default: 18]")
@click.option("--static-batch", is_flag=True, help="Fix the batch size to one.")
@click.option(
    "--tolerance",
    type=float,
    help="Largest accepted relative difference from the torch model. [default: 1e-4, more where "
    "float32 itself is further than that from float64]",
)
@json_option
def command(
    model: str,
    checkpoint: str | None,
    output: str,
    force: bool,
    opset: int | None,
    static_batch: bool,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Export MODEL to ONNX, checked in onnxruntime against the torch model.

    When the numbers differ, nothing is written and the exit code is 1.
    """
    from bnconvert.export import export_onnx
    from bnconvert.models import load_model

    report = export_onnx(
        load_model(model, checkpoint),
        output,
        opset=opset,
        dynamic_batch=not static_batch,
        tolerance=tolerance,
        overwrite=force,
    )
    show(report, as_json)
