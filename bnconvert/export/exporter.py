"""`export_onnx`: from a torch model to a proven ONNX file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from bnconvert.arguments import Arguments, make_arguments
from bnconvert.errors import BnconvertError
from bnconvert.export.capture import capture
from bnconvert.export.files import check_destination, staged
from bnconvert.export.prepare import prepare
from bnconvert.export.report import ExportReport
from bnconvert.export.translate import TRANSLATED_OPSETS, translate
from bnconvert.export.verify import TOLERANCE, make_cases, verify

if TYPE_CHECKING:
    import os

    from torch import nn
    from torch.export import ExportedProgram

DEFAULT_OPSET = 18
PROVEN_BATCHES = (1, 2, 5)


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write a model as an ONNX file that is proven equal to it.

    The model is copied, put into eval mode, captured, folded and translated. The file is then
    checked, run in onnxruntime with all rewrites off and on, on several batch sizes, and compared
    with the torch model in float32 and float64. When anything fails, nothing is written. The
    model given is not changed.

    Args:
        model: The model; in any mode, with plain, synchronised or frozen BatchNorm.
        path: The file to write.
        example_inputs: A tensor, a tuple of positional or a dict of keyword arguments; None for
            images of a timm model's own input size.
        opset: Version of the ONNX operator set; None is 18.
        dynamic_batch: Leave the batch size open, and prove sizes 1, 2 and 5; else the file takes
            the batch size of the example.
        tolerance: Largest accepted max|a - b| / max|b| of an output against the torch model in
            float32. None is 1e-4, or ten times the torch model's own distance from float64 where
            that is more, but never more than 1e-2.
        overwrite: Replace an existing file.

    Returns:
        What was done and proven.

    Raises:
        BnconvertError: The model or the inputs do not fit, an operation has no translation, or the
            destination is refused; nothing was written.
        VerificationError: The file does not equal the model; nothing was written.
    """
    path = Path(path)
    check_destination(path, overwrite)
    opset = _check_opset(opset)
    arguments = make_arguments(model, example_inputs)
    prepared = prepare(model)
    arguments = arguments.to(torch.float32)
    batches = PROVEN_BATCHES if dynamic_batch else (arguments.batch or 1,)
    cases = make_cases(prepared.model, [arguments.with_batch(n) for n in batches])
    program = capture(
        prepared.model,
        _example(arguments, dynamic_batch),
        dynamic_batch=dynamic_batch,
        dynamic_size=False,
    )
    graph = translate(program, opset, list(cases[0].expected))
    with staged(path, overwrite) as file:
        ir.save(graph, file)
        checks = verify(file, cases, tolerance)
        size = file.stat().st_size
    return ExportReport(
        files={path: size},
        opset=opset,
        fold=None,
        captured=_operations(program),
        nodes=dict(Counter(node.op_type for node in graph.graph.all_nodes()).most_common()),
        checks=checks,
        tolerance=max(case.limit(tolerance, TOLERANCE[torch.float32]) for case in cases),
        notes=prepared.notes,
    )


def _check_opset(opset: int | None) -> int:
    if opset is None:
        return DEFAULT_OPSET
    if opset not in TRANSLATED_OPSETS:
        first, last = TRANSLATED_OPSETS[0], TRANSLATED_OPSETS[-1]
        raise BnconvertError(f"opset: {opset} is not available; choose one from {first} to {last}")
    return opset


def _example(arguments: Arguments, dynamic_batch: bool) -> Arguments:
    """Return arguments to capture with: torch takes a batch of one for a constant."""
    return arguments.with_batch(2) if dynamic_batch and arguments.batch == 1 else arguments


def _operations(program: ExportedProgram) -> dict[str, int]:
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return dict(Counter(str(node.target).removesuffix(".default") for node in calls).most_common())
