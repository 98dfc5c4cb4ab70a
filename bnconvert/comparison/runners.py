"""Run a torch model or an ONNX file on the same arguments, and measure how outputs differ."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from bnconvert.arguments import Arguments, output_names, output_tensors
from bnconvert.errors import BnconvertError, first_line
from bnconvert.probe import buffers_kept

if TYPE_CHECKING:
    import onnxruntime


class RuntimeLevel(str, enum.Enum):
    """How far onnxruntime may rewrite a graph before it runs."""

    DISABLE_ALL = "ORT_DISABLE_ALL"
    ENABLE_ALL = "ORT_ENABLE_ALL"

    def __str__(self) -> str:
        return self.value


class Runner(Protocol):
    """Something that turns arguments into named outputs."""

    name: str

    def run(self, arguments: Arguments) -> dict[str, torch.Tensor]:
        """Return the outputs by name, in order."""


class TorchRunner:
    """Runs a torch module in eval mode, as it is; the caller has set its mode."""

    def __init__(self, model: nn.Module, name: str = "") -> None:
        self.name = name or type(model).__name__
        self._model = model

    def run(self, arguments: Arguments) -> dict[str, torch.Tensor]:
        """Return the outputs by name, detached."""
        own = arguments.map(torch.clone)  # a forward may write into its input
        with buffers_kept(self._model):
            output = self._model(*own.args, **own.kwargs)
        tensors = [_dense(tensor.detach().cpu()) for tensor in output_tensors(output)]
        return dict(zip(output_names(output), tensors, strict=True))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


class OnnxRunner:
    """Runs an ONNX file in onnxruntime on the CPU.

    Args:
        model: A path, or the bytes of a model without external data.
        level: How far onnxruntime may rewrite the graph.
        name: Shown in tables; the file's name if empty.

    Raises:
        BnconvertError: onnxruntime does not load the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        level: RuntimeLevel = RuntimeLevel.ENABLE_ALL,
        name: str = "",
    ) -> None:
        self.name = name or (model.name if isinstance(model, Path) else "ONNX model")
        self._session = _open_session(model, level, self.name)

    @property
    def inputs(self) -> list[onnxruntime.NodeArg]:
        """Name, shape and type of each input."""
        return list(self._session.get_inputs())

    def run(self, arguments: Arguments) -> dict[str, torch.Tensor]:
        """Return the outputs by name.

        Raises:
            BnconvertError: The arguments do not fit the file's inputs, or running fails.
        """
        tensors = arguments.tensors
        by_name = {k: v for k, v in arguments.kwargs.items() if isinstance(v, torch.Tensor)}
        known = {entry.name for entry in self.inputs}
        if set(by_name) != known:
            unknown = sorted(set(by_name) - known)
            if unknown and known & set(by_name):
                raise BnconvertError(
                    f"{self.name}: has no input {', '.join(unknown)}; it has "
                    f"{', '.join(sorted(known))}"
                )
            if len(tensors) != len(self.inputs):
                wanted = ", ".join(entry.name for entry in self.inputs)
                raise BnconvertError(
                    f"{self.name}: takes {len(self.inputs)} inputs ({wanted}) but {len(tensors)} "
                    "tensors were given; pass one tensor for each"
                )
            by_name = {e.name: t for e, t in zip(self.inputs, tensors, strict=True)}
        feed = {name: tensor.numpy() for name, tensor in by_name.items()}
        try:
            values = self._session.run(None, feed)
        except Exception as error:  # onnxruntime has no public base class of its errors
            said = " ".join(str(error).split())
            raise BnconvertError(f"{self.name}: onnxruntime fails: {said}") from error
        names = [entry.name for entry in self._session.get_outputs()]
        named = zip(names, map(np.asarray, values), strict=True)
        return {
            name: torch.from_numpy(value) for name, value in named if value.dtype.kind in "biufc"
        }


def refuse_missing_weights(path: Path) -> None:
    """Raise where weights of an ONNX file are in another file that is not there.

    Another damage of the file is not looked for here.

    Raises:
        BnconvertError: As said.
    """
    import onnx

    try:
        graph = onnx.load(path, load_external_data=False).graph
    except Exception:  # protobuf's DecodeError has no public name
        return
    for tensor in graph.initializer:
        places = [e.value for e in tensor.external_data if e.key == "location"]
        missing = [place for place in places if not (path.parent / place).is_file()]
        if missing:
            raise BnconvertError(
                f"{path}: its weights are in {missing[0]}, which is not there; put it beside the "
                "model"
            )


def _open_session(
    model: Path | bytes, level: RuntimeLevel, name: str
) -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level.value)
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # warnings are about rewrites of the graph; errors are raised
    source = str(model) if isinstance(model, Path) else model
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no public base class of its errors
        if isinstance(model, Path):
            refuse_missing_weights(model)
        raise BnconvertError(
            f"{name}: onnxruntime does not load it: {first_line(error)}"
        ) from error


def relative_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return max|value - reference| / max|reference|, computed in float64.

    Equal infinities and NaN in the same places count as equal. Tensors of other shapes, and
    infinities or NaN in one of both only, are infinitely different. Where the reference is zero
    throughout, the result is max|value|.
    """
    difference = absolute_difference(value, reference)
    if difference in (0.0, float("inf")):
        return difference
    sizes = _wide(reference).abs()
    scale = torch.where(sizes.isfinite(), sizes, 0.0).max().item()
    return float(difference / scale) if scale else difference


def absolute_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return max|value - reference|, computed in float64; see `relative_difference`."""
    if value.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    a, b = _wide(value), _wide(reference)
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((same | (a.isfinite() & b.isfinite())).all()):
        return float("inf")
    return float(torch.where(same, 0.0, (a - b).abs()).max().item())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def other_shape(values: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> str:
    """Return "output y has shape (2, 4) and not (5, 4)" of the first other shape, "" if none is."""
    for (name, value), expected in zip(values.items(), reference.values(), strict=True):
        if value.shape != expected.shape:
            return f"output {name} has shape {tuple(value.shape)} and not {tuple(expected.shape)}"
    return ""


def largest_difference(
    values: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> float:
    """Return the largest relative difference of outputs that are paired by position.

    Raises:
        BnconvertError: The numbers of outputs differ.
    """
    if len(values) != len(reference):
        raise BnconvertError(
            f"outputs: one model gives {len(values)} ({', '.join(values)}), the other "
            f"{len(reference)} ({', '.join(reference)}); compare models with the same outputs"
        )
    pairs = zip(values.values(), reference.values(), strict=True)
    return max((relative_difference(a, b) for a, b in pairs), default=0.0)
