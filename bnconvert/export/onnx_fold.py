"""`fold_onnx`: fold the BatchNormalization nodes of an ONNX file, with proof."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from bnconvert.arguments import Arguments
from bnconvert.capturing import quiet_log
from bnconvert.comparison.layerwise import all_values
from bnconvert.comparison.runners import (
    OnnxRunner,
    RuntimeLevel,
    largest_difference,
    refuse_missing_weights,
)
from bnconvert.errors import BnconvertError, VerificationError, first_line
from bnconvert.export.files import check_destination, save_graph, staged
from bnconvert.export.onnx_double import run_in_float64
from bnconvert.export.onnx_folding import fold_graph
from bnconvert.report import Report, format_table

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from bnconvert.export.onnx_paths import Shapes

LIMIT = 1e-9
"""Largest relative difference that folding may make with everything computed in float64."""

TOLERANCE = 1e-4
"""Largest relative difference in onnxruntime, in the file's own precision."""

HALF_TOLERANCE = 2e-2
"""The same for a file that holds float16 or bfloat16 weights."""

_OPEN_BATCHES = (3, 2)  # folding looks at the shapes of the first, so another proves generality
_OPEN_SIZE = 64
_LARGEST_SIZE = 2**31


@dataclass(frozen=True)
class OnnxFoldReport(Report):
    """What became of each BatchNormalization node, and the measured differences.

    Attributes:
        float64: Largest relative difference with everything computed in float64; None where onnx's
            reference implementation does not run the graph.
        runtime: The same in onnxruntime in the file's own precision, by level.
        nodes: Number of nodes before and after.
    """

    float64: float | None = None
    runtime: tuple[tuple[str, float], ...] = ()
    nodes: tuple[int, int] = (0, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; the measurements are added."""
        proof = {"float64": self.float64, "runtime": dict(self.runtime)}
        return {**super().to_dict(), "proof": proof, "nodes": list(self.nodes)}

    def __str__(self) -> str:
        """Return the table of nodes and the measured differences."""
        exact = "not available" if self.float64 is None else f"{self.float64:.1e}"
        lines = [super().__str__(), f"nodes: {self.nodes[0]} before, {self.nodes[1]} after"]
        lines.append(f"largest relative difference in float64: {exact}; in onnxruntime:")
        lines += format_table([(level, f"{value:.1e}") for level, value in self.runtime])
        return "\n".join(lines)


def fold_onnx(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str] | None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> OnnxFoldReport:
    """Fold the BatchNormalization nodes of an ONNX file into the operators around them.

    Args:
        source: The file to read; it is not changed.
        path: The file to write; None writes none and only reports.
        shapes: Shapes of inputs to run the proof on, by name. An input that is not named has three
            and then two rows where the first dimension is open, and 64 in other open dimensions.
        tolerance: Largest accepted max|a - b| / max|b| of an output in onnxruntime; None for 1e-4,
            and 2e-2 where the file holds weights of half precision.
        overwrite: Replace an existing file.

    Returns:
        What became of each node, and the proof.

    Raises:
        BnconvertError: The file is not an ONNX model, does not run on such inputs, or the
            destination is refused; nothing was written.
        VerificationError: The folded graph differs; nothing was written.
    """
    source = Path(source)
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise BnconvertError(f"tolerance: is {tolerance}; give a finite number of at least 0")
    if path is not None:
        check_destination(Path(path), overwrite)
        if Path(path).resolve() == source.resolve():
            raise BnconvertError(f"{path}: is the input itself; give another output")
    model = _read(source)
    if path is not None and Path(path).resolve() in _companions(model, source):
        raise BnconvertError(f"{path}: holds the weights of the input; give another output")
    if tolerance is None:
        tolerance = HALF_TOLERANCE if _is_half(model) else TOLERANCE
    before = sum(1 for _ in model.graph.all_nodes())
    inputs = [_random_inputs(source, shapes or {}, batch) for batch in _OPEN_BATCHES]
    seen = _shapes_of_values(model, source, inputs[0])
    report = fold_graph(model, seen)
    _infer_shapes(model)
    after = sum(1 for _ in model.graph.all_nodes())
    exact = _prove(source, inputs, seen)
    destination = Path(path) if path is not None else source.with_name(f"{source.name}.folded")
    with staged(destination, overwrite, keep=path is not None) as file:
        save_graph(model, file, external_data="auto")
        _check(file)
        runtime = tuple(
            (level.value, _runtime_difference(source, file, inputs, level, tolerance))
            for level in RuntimeLevel
        )
    return OnnxFoldReport("fold-onnx", report.layers, exact, runtime, (before, after))


def _read(path: Path) -> ir.Model:
    if not path.is_file():
        raise BnconvertError(f"{path}: there is no such file; pass an ONNX file")
    try:
        model = ir.load(path)
        _name_domain(model)
        model.graph.sort()
        if model.functions:
            common.InlinePass()(model)
        _infer_shapes(model)
    except Exception as error:  # protobuf's DecodeError has no public name
        raise BnconvertError(
            f"{path}: is not an ONNX model: {first_line(_cause(error))}"
        ) from error
    if not len(model.graph) or not model.graph.outputs:
        raise BnconvertError(f"{path}: holds no graph; pass an ONNX model")
    stored = [value.const_value for value in model.graph.initializers.values()]
    if any(isinstance(tensor, ir.ExternalTensor) for tensor in stored):
        refuse_missing_weights(path)
    return model


def _name_domain(model: ir.Model) -> None:
    """Write "" for "ai.onnx", which is the other name of the same operators."""
    version = model.opset_imports.pop("ai.onnx", None)
    if version is not None:
        model.opset_imports.setdefault("", version)
    for node in model.graph.all_nodes():
        if node.domain == "ai.onnx":
            node.domain = ""


def _infer_shapes(model: ir.Model) -> None:
    """Note the types and shapes that follow from those known, where onnx can tell."""
    with quiet_log("onnx_ir"):  # it prints a traceback and goes on
        common.ShapeInferencePass()(model)


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _companions(model: ir.Model, source: Path) -> set[Path]:
    """Return the files that hold weights of a model."""
    stored = (value.const_value for value in model.graph.initializers.values())
    places = {tensor.location for tensor in stored if isinstance(tensor, ir.ExternalTensor)}
    return {(source.parent / place).resolve() for place in places}


def _is_half(model: ir.Model) -> bool:
    halves = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    nodes = (node.attributes.get("value") for node in model.graph.all_nodes())
    constants = [a.as_tensor() for a in nodes if a and a.type == ir.AttributeType.TENSOR]
    stored = [value.const_value for value in model.graph.initializers.values()]
    return any(tensor is not None and tensor.dtype in halves for tensor in (*stored, *constants))


def _shapes_of_values(
    model: ir.Model, source: Path, arguments: Arguments
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every value of a graph that was read from a file, in one run."""
    with tempfile.TemporaryDirectory() as folder:
        inlined = Path(folder) / source.name  # the values inside functions have names only there
        save_graph(model, inlined, external_data="auto")
        results = all_values(inlined, arguments, RuntimeLevel.DISABLE_ALL)
    values = {**arguments.kwargs, **results}
    return {name: tuple(value.shape) for name, value in values.items()}


def _random_inputs(path: Path, shapes: Mapping[str, Sequence[int]], batch: int) -> Arguments:
    runner = OnnxRunner(path, RuntimeLevel.DISABLE_ALL)
    names = {entry.name for entry in runner.inputs}
    unknown = sorted(set(shapes) - names)
    if unknown:
        raise BnconvertError(
            f"shapes: {path.name} has no input {', '.join(unknown)}; it has "
            f"{', '.join(sorted(names))}"
        )
    for name, given in shapes.items():
        if not all(0 < size < _LARGEST_SIZE for size in given):
            raise BnconvertError(f"shapes: {name} is {list(given)}; give sizes of at least 1")
    generator = np.random.default_rng(batch)
    values = {}
    for entry in runner.inputs:
        shape = shapes.get(entry.name) or [
            size if isinstance(size, int) and size > 0 else _OPEN_SIZE if axis else batch
            for axis, size in enumerate(entry.shape)
        ]
        try:
            values[entry.name] = _random(entry.type, tuple(shape), generator)
        except (TypeError, MemoryError) as error:
            raise BnconvertError(
                f"{path}: its input {entry.name}, {entry.type} of shape {shape}, cannot be given "
                f"values to prove the result on: {first_line(error)}"
            ) from error
    return Arguments((), values)


def _random(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> torch.Tensor:
    floats = {"float": np.float32, "double": np.float64, "float16": np.float16}
    name = kind.removeprefix("tensor(").removesuffix(")")
    if name in floats:
        return torch.from_numpy(generator.standard_normal(shape).astype(floats[name]))
    return torch.from_numpy(np.ones(shape, dtype=np.dtype(name)))


def _prove(source: Path, inputs: list[Arguments], shapes: Shapes) -> float | None:
    """Fold the graph in float64 and return how far it is from the original in float64."""
    original, folded = _read(source), _read(source)
    values = [run_in_float64(original, arguments, fold=None) for arguments in inputs]
    if any(value is None for value in values):
        return None
    largest = 0.0
    for arguments, expected in zip(inputs, values, strict=True):
        result = run_in_float64(folded, arguments, fold=shapes)
        assert result is not None  # noqa: S101 (the original ran, with the same operators)
        assert expected is not None  # noqa: S101
        largest = max(largest, largest_difference(result, expected))
    if not largest <= LIMIT:
        raise VerificationError(
            f"fold-onnx: in float64 the folded graph differs from the original by {largest:.1e}, "
            f"accepted is {LIMIT:.0e}; nothing was written"
        )
    return largest


def _check(file: Path) -> None:
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(
            f"onnx.checker: {first_line(error)}; nothing was written"
        ) from error


def _runtime_difference(
    source: Path, file: Path, inputs: list[Arguments], level: RuntimeLevel, tolerance: float
) -> float:
    original, folded = OnnxRunner(source, level), OnnxRunner(file, level)
    largest = max(largest_difference(folded.run(x), original.run(x)) for x in inputs)
    if not largest <= tolerance:
        raise VerificationError(
            f"fold-onnx: in onnxruntime at {level} the folded file differs by {largest:.1e}, "
            f"accepted is {tolerance:.1e}; nothing was written"
        )
    return largest
