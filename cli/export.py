"""`bnconvert export`: a model as a verified ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bnconvert.cli.output import (
    exit_if_left,
    images_of_size,
    input_size_option,
    json_option,
    model_argument,
    output_options,
    show,
    strict_option,
)


@click.command("export")
@model_argument
@output_options("ONNX file")
@input_size_option
@click.option("--opset", type=int, help="Version of the ONNX operator set. [default: 18]")
@click.option("--static-batch", is_flag=True, help="Fix the batch size to --batch-size.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The size that is fixed.",
)
@click.option("--dynamic-size", is_flag=True, help="Leave height and width of images open.")
@click.option("--no-fold", is_flag=True, help="Keep BatchNorm as nodes of their own.")
@click.option(
    "--rewrite-activations",
    is_flag=True,
    help="Also fold BatchNorm across a ReLU, into a clamp per channel; slower in onnxruntime.",
)
@click.option("--fp16", is_flag=True, help="Store weights in float16; inputs stay float32.")
@click.option(
    "--external-data/--single-file",
    default=None,
    help="Store weights in a second file, FILE.data. [default: above 2 GB]",
)
@click.option("--no-metadata", is_flag=True, help="Do not describe the model in the file.")
@click.option(
    "--with-preprocess", is_flag=True, help="The file takes uint8 images and normalises them."
)
@click.option("--softmax", is_flag=True, help="The file gives probabilities.")
@click.option(
    "--tolerance",
    type=float,
    help="Largest accepted relative difference from the torch model. [default: 1e-4, more where "
    "float32 itself is further than that from float64; 2e-2 with --fp16]",
)
@strict_option
@json_option
def command(
    model: str,
    checkpoint: str | None,
    output: str,
    force: bool,
    input_size: str | None,
    batch_size: int,
    fp16: bool,
    static_batch: bool,
    no_fold: bool,
    no_metadata: bool,
    external_data: bool | None,
    with_preprocess: bool,
    strict: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Export MODEL to ONNX, checked in onnxruntime against the torch model.

    When the numbers differ, nothing is written and the exit code is 1.
    """
    import torch

    from bnconvert.arguments import make_arguments
    from bnconvert.export import export_onnx
    from bnconvert.export.files import check_destination
    from bnconvert.export.metadata import checkpoint_entries
    from bnconvert.models import load_model

    check_destination(Path(output), overwrite=force)
    loaded = load_model(model, checkpoint)
    inputs = images_of_size(input_size, batch_size if static_batch else 2)
    if inputs is None and static_batch:
        inputs = make_arguments(loaded, None).with_batch(batch_size).tensors[0]
    report = export_onnx(
        loaded,
        output,
        inputs,
        dynamic_batch=not static_batch,
        fold=not no_fold,
        dtype=torch.float16 if fp16 else None,
        external_data="auto" if external_data is None else external_data,
        metadata=False if no_metadata else checkpoint_entries(model, checkpoint),
        overwrite=force,
        preprocess=with_preprocess,
        **options,
    )
    show(report, as_json)
    if report.fold:
        exit_if_left(report.fold, strict)
