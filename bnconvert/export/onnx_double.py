"""Run an ONNX graph with everything in float64, by onnx's reference implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_ir.passes import common

from bnconvert.export.onnx_folding import fold_graph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bnconvert.arguments import Arguments
    from bnconvert.export.onnx_paths import Shapes

_NARROW = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class BatchNormalization(OpRun):  # type: ignore[misc]  # onnx is untyped here
    """The operator in inference; onnx's own takes the batch's statistics up to opset 13."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        mean: np.ndarray,
        var: np.ndarray,
        epsilon: float,
        training_mode: int = 0,
        **_: Any,
    ) -> tuple[np.ndarray]:
        if training_mode:
            raise NotImplementedError("BatchNormalization in training mode")
        shape = (1, -1) + (1,) * (x.ndim - 2)
        scale, bias, mean, var = (each.reshape(shape) for each in (scale, bias, mean, var))
        return ((x - mean) / np.sqrt(var + epsilon) * scale + bias,)


class ConvTranspose(OpRun):  # type: ignore[misc]  # onnx is untyped here
    """The operator with explicit padding; onnx's own does not take groups."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        output_padding: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        if auto_pad not in (None, "NOTSET") or output_shape:
            raise NotImplementedError("ConvTranspose with automatic padding")
        rank = x.ndim - 2
        pads = pads or (0,) * 2 * rank
        more = output_padding or (0,) * rank
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        y = convolve(
            torch.from_numpy(np.array(x)),
            torch.from_numpy(np.array(weight)),
            stride=tuple(strides or (1,) * rank),
            dilation=tuple(dilations or (1,) * rank),
            groups=group,
        )
        edges = [(-pads[axis], more[axis] - pads[rank + axis]) for axis in range(rank)]
        y = F.pad(y, [edge for pair in reversed(edges) for edge in pair])
        if bias is not None:
            y = y + torch.from_numpy(np.array(bias)).view(-1, *(1,) * rank)
        return (y.numpy(),)


def run_in_float64(
    model: ir.Model, arguments: Arguments, *, fold: Shapes | None
) -> dict[str, torch.Tensor] | None:
    """Return the outputs of a graph computed in float64.

    Args:
        model: Converted in place.
        arguments: One tensor per input, by name.
        fold: Fold the graph first, with weights kept in float64; the shapes of its values.

    Returns:
        The outputs by name; None where the reference implementation lacks an operator.

    Raises:
        BnconvertError: A folded weight is not finite.
    """
    _to_double(model)
    if fold is not None:
        fold_graph(model, fold)
    feed = {
        name: value.double().numpy() if value.is_floating_point() else value.numpy()
        for name, value in arguments.kwargs.items()
    }
    try:
        outputs = _evaluator(model).run(None, feed)
    except Exception:  # the reference raises whatever its operators raise
        return None
    names = [value.name or "" for value in model.graph.outputs]
    arrays = [np.array(output, order="C") for output in outputs]  # a reversed one is a view
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


def _evaluator(model: ir.Model) -> ReferenceEvaluator:
    return ReferenceEvaluator(
        ir.serde.serialize_model(model), new_ops=[BatchNormalization, ConvTranspose]
    )


def _to_double(model: ir.Model) -> None:
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    graph = model.graph
    for name, value in graph.initializers.items():
        if value.const_value is not None and value.const_value.dtype in _NARROW:
            array = value.const_value.numpy().astype(np.float64)
            value.const_value = ir.tensor(array, name=name)
            value.dtype = ir.DataType.DOUBLE
    for value in (*graph.inputs, *(out for node in graph.all_nodes() for out in node.outputs)):
        if value.dtype in _NARROW:
            value.dtype = ir.DataType.DOUBLE
    for node in graph.all_nodes():
        _attributes_to_double(node)


def _attributes_to_double(node: ir.Node) -> None:
    for key in ("to", "dtype"):
        if key in node.attributes and node.attributes[key].value in _NARROW:
            node.attributes[key] = ir.AttrInt64(key, int(ir.DataType.DOUBLE))
    value = node.attributes.get("value")
    if value is not None and value.type == ir.AttributeType.TENSOR:
        tensor = value.as_tensor()
        if tensor.dtype in _NARROW:
            wide = ir.tensor(tensor.numpy().astype(np.float64), name=tensor.name)
            node.attributes["value"] = ir.AttrTensor("value", wide)
