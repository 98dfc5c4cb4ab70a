"""`export_onnx`: from a torch model to a proven ONNX file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from bnconvert.arguments import Arguments, make_arguments
from bnconvert.errors import BnconvertError
from bnconvert.export.capture import capture
from bnconvert.export.constants import compute_constants
from bnconvert.export.files import check_destination, save_graph, staged
from bnconvert.export.folding import fold_program
from bnconvert.export.half import to_half
from bnconvert.export.metadata import describe
from bnconvert.export.opset import check_opset, to_opset
from bnconvert.export.prepare import prepare
from bnconvert.export.report import ExportReport
from bnconvert.export.serving import TensorsOnly, add_preprocess, add_softmax
from bnconvert.export.translate import translate
from bnconvert.export.verify import Case, largest_values, make_cases, tolerance_of, verify

if TYPE_CHECKING:
    import os

    import onnx_ir as ir
    from torch import nn
    from torch.export import ExportedProgram

PROVEN_BATCHES = (1, 2, 5)
_SECOND_SIZE = (32, 64)  # added to the example's height and width; most models divide by 32

ExternalData = bool | Literal["auto"]


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    dynamic_size: bool = False,
    fold: bool = True,
    rewrite_activations: bool = False,
    dtype: torch.dtype | None = None,
    external_data: ExternalData = "auto",
    metadata: bool | Mapping[str, str] = True,
    tolerance: float | None = None,
    overwrite: bool = False,
    preprocess: bool = False,
    softmax: bool = False,
    dry_run: bool = False,
) -> ExportReport:
    """Write a model as an ONNX file that is proven equal to it.

    The model is copied, put into eval mode, captured, folded and translated. The file is then
    checked, run in onnxruntime with all rewrites off and on, on several batch sizes, and compared
    with the torch model in float32 and float64. When anything fails, nothing is written. The
    model given is not changed.

    Args:
        model: The model; in any mode, with plain, synchronised, frozen or folded BatchNorm.
        path: The file to write.
        example_inputs: A tensor, a tuple of positional or a dict of keyword arguments; None for
            images of a timm model's own input size.
        opset: Version of the ONNX operator set; None is 18. Another one is honoured or refused.
        dynamic_batch: Leave the batch size open, and prove sizes 1, 2 and 5; else the file takes
            the batch size of the example.
        dynamic_size: Leave height and width of images open, and prove a second size.
        fold: Fold BatchNorm layers first; else they stay BatchNormalization nodes.
        rewrite_activations: Also fold a BatchNorm before a ReLU into a clamp per channel. Off,
            because onnxruntime runs BatchNormalization and Relu faster.
        dtype: None for float32 weights, or `torch.float16`; inputs and outputs stay float32.
        external_data: Store weights in a second file, `<path>.data`; "auto" does so above 2 GB.
        metadata: Describe the model in the file's metadata; a mapping gives further entries.
        tolerance: Largest accepted max|a - b| / max|b| of an output against the torch model in
            float32. None is 1e-4, or ten times the torch model's own distance from float64 where
            that is more, but never more than 1e-2; for float16 weights it is 2e-2.
        overwrite: Replace an existing file.
        preprocess: The file takes uint8 images, (batch, height, width, 3), and normalises them
            with the mean and deviation of the model's timm configuration.
        softmax: The file gives probabilities in place of scores.
        dry_run: Do and prove everything, but leave no file.

    Returns:
        What was done and proven.

    Raises:
        BnconvertError: The model or the inputs do not fit, an operation has no translation, or the
            destination is refused; nothing was written.
        VerificationError: The file does not equal the model; nothing was written.
    """
    path = Path(path)
    check_destination(path, overwrite)
    opset = check_opset(opset)
    if dtype not in (None, torch.float32, torch.float16):
        raise BnconvertError(f"dtype: {dtype} is not offered; pass None or torch.float16")
    if external_data not in (True, False, "auto"):
        raise BnconvertError(
            f"external_data: {external_data!r} is not offered; pass True, False or 'auto'"
        )
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise BnconvertError(f"tolerance: is {tolerance}; give a finite number of at least 0")
    arguments = make_arguments(model, example_inputs)
    prepared = prepare(model)
    arguments = arguments.to(torch.float32)
    entries = _entries(prepared.model, metadata, preprocess=preprocess, softmax=softmax)
    if preprocess:
        arguments = add_preprocess(prepared.model, arguments)
    tensors_only = TensorsOnly()
    prepared.model.register_forward_hook(tensors_only)
    if softmax:
        add_softmax(prepared.model)
    cases = make_cases(prepared.model, _variants(arguments, dynamic_batch, dynamic_size), arguments)
    notes = [*prepared.notes, *tensors_only.notes]
    notes += [f"argument {name} is fixed: {value!r}" for name, value in arguments.fixed.items()]
    program = capture(
        prepared.model,
        _capturable(arguments, dynamic_batch),
        dynamic_batch=dynamic_batch,
        dynamic_size=dynamic_size,
    )
    captured = _operations(program)
    report = None
    if fold:
        program, report, layers = fold_program(program, rewrite_activations)
        entries |= layers if metadata is not False else {}
    program = compute_constants(program)
    graph = to_opset(translate(program, opset, list(cases[0].expected)), opset)
    graph.metadata_props.update(entries)
    notes += ["dry run: nothing was written"] if dry_run else []
    with staged(path, overwrite, keep=not dry_run) as file:
        if dtype is torch.float16:
            notes += _round_to_half(graph, file, cases)
        save_graph(graph, file, external_data)
        checks = verify(file, prepared.model, cases, tolerance_of(cases, tolerance, dtype))
        files = {path.parent / p.name: p.stat().st_size for p in sorted(file.parent.iterdir())}
    return ExportReport(
        files=files,
        opset=opset,
        fold=report,
        captured=captured,
        nodes=_node_counts(graph),
        checks=checks,
        tolerance=tolerance_of(cases, tolerance, dtype),
        notes=tuple(notes),
    )


def _entries(
    model: nn.Module, metadata: bool | Mapping[str, str], *, preprocess: bool, softmax: bool
) -> dict[str, str]:
    if metadata is False:
        return {}
    entries = describe(model, preprocess=preprocess, softmax=softmax)
    own = dict(metadata) if isinstance(metadata, Mapping) else {}
    if not all(isinstance(text, str) for entry in own.items() for text in entry):
        raise BnconvertError("metadata: holds what is no text; pass text by text")
    return entries | own


def _variants(arguments: Arguments, dynamic_batch: bool, dynamic_size: bool) -> list[Arguments]:
    """Return the arguments to prove: each batch size, and a second image size."""
    batches = PROVEN_BATCHES if dynamic_batch else (arguments.batch or 1,)
    variants = [arguments.with_batch(batch) for batch in batches]
    if dynamic_size:
        variants.append(variants[0].with_larger_images(*_SECOND_SIZE))
    return variants


def _capturable(arguments: Arguments, dynamic_batch: bool) -> Arguments:
    """Return arguments to capture with: torch takes a batch of one for a constant."""
    return arguments.with_batch(2) if dynamic_batch and arguments.batch == 1 else arguments


def _round_to_half(graph: ir.Model, file: Path, cases: list[Case]) -> list[str]:
    """Round a graph to float16 in place, and say what stays in float32."""
    save_graph(graph, file, external_data="auto")
    kept = to_half(graph, largest_values(file, cases))
    for written in file.parent.iterdir():
        written.unlink()
    names = ", ".join(kept)
    return [f"kept in float32, float16 cannot hold their values: {names}"] if kept else []


def _operations(program: ExportedProgram) -> dict[str, int]:
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return dict(Counter(str(node.target).removesuffix(".default") for node in calls).most_common())


def _node_counts(graph: ir.Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in graph.graph.all_nodes()).most_common())
