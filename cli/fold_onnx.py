"""`bnconvert fold-onnx`: fold the BatchNormalization nodes of an ONNX file."""

from __future__ import annotations

import click

from bnconvert.cli.output import (
    UsageError,
    exit_if_left,
    json_option,
    output_options,
    show,
    strict_option,
)


@click.command("fold-onnx")
@click.argument("file", metavar="IN.onnx")
@output_options("ONNX file")
@click.option(
    "--shape",
    "shapes",
    metavar="NAME:N,N,...",
    multiple=True,
    help="Shape of an input to prove the result on; repeat for more inputs.",
)
@click.option(
    "--tolerance",
    type=float,
    help="Largest accepted relative difference in onnxruntime. [default: 1e-4; 2e-2 where the file "
    "holds float16 weights]",
)
@strict_option
@json_option
def command(
    file: str,
    output: str,
    force: bool,
    dry_run: bool,
    shapes: tuple[str, ...],
    tolerance: float | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Fold the BatchNormalization nodes of IN.onnx into the operators around them.

    The result is compared with the original in float64 and in onnxruntime; when they differ,
    nothing is written and the exit code is 1.
    """
    from bnconvert.export import fold_onnx

    report = fold_onnx(
        file,
        None if dry_run else output,
        shapes=dict(map(_shape, shapes)),
        tolerance=tolerance,
        overwrite=force,
    )
    show(report, as_json)
    exit_if_left(report, strict)


def _shape(text: str) -> tuple[str, list[int]]:
    name, colon, sizes = text.rpartition(":")
    try:
        shape = [int(size) for size in sizes.split(",")]
    except ValueError:
        shape = []
    if not colon or not shape or min(shape) < 1:
        raise UsageError(f"--shape: {text} is not NAME:N,N,...; write for example x:1,3,48,192")
    return name, shape
