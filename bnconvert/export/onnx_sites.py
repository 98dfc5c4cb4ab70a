"""The ONNX operators that can take up a per-channel affine map, and how.

The map goes into new weights in float64, by `bnconvert.fold.algebra`; they are cast once, to the
type of the old ones. The node gets weights of its own, so that others that read the old ones keep
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch

from bnconvert.export.onnx_constants import add_initializer, constant_array, why_not_constant
from bnconvert.export.onnx_paths import UNSHIFTED, BlockedError, is_padded, label
from bnconvert.fold.algebra import Affine, Layout, absorb_after, absorb_before, cast
from bnconvert.fold.channels import along

if TYPE_CHECKING:
    from collections.abc import Callable

SITES = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization"})
_CHANNEL_AXIS = 1


def constant(value: ir.Value | None) -> torch.Tensor | None:
    """Return the numbers of a constant, or None for anything else."""
    array = constant_array(value)
    if array is None or array.dtype.kind not in "fiub":
        return None
    return torch.from_numpy(np.array(array))


@dataclass(frozen=True)
class Weights:
    """The linear part of a node: `result = weight applied to input + bias`.

    Attributes:
        weight: Stored weight; for Gemm with alpha multiplied in.
        bias: One value per output channel, for Gemm with beta multiplied in; None without.
        layout: How channels lie in the weight.
        axis: Axis of the channels in the input and the output, from the end if negative.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    layout: Layout
    axis: int

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return self.layout.channels(self.weight)[0]

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        return self.layout.channels(self.weight)[1]


def read_weights(node: ir.Node) -> Weights:
    """Return the weights of a Conv, ConvTranspose, Gemm or MatMul.

    Raises:
        BlockedError: They are computed, or have a shape that does not fit.
    """
    given = node.inputs[weight_place(node)]
    weight = constant(given)
    if weight is None:
        raise BlockedError(_unknown(node, "weight", given))
    if node.op_type == "MatMul":
        return _matmul(node, weight)
    given = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(given)
    if given is not None and bias is None:
        raise BlockedError(_unknown(node, "bias", given))
    if node.op_type == "Gemm":
        return _gemm(node, weight, bias)
    groups = _attribute(node, "group", 1)
    layout = Layout(transposed=node.op_type == "ConvTranspose", groups=int(groups))
    return Weights(weight, bias, layout, _CHANNEL_AXIS)


def weight_place(node: ir.Node) -> int:
    """Return which input of a site is its weight; of a MatMul it may be the first."""
    return 0 if node.op_type == "MatMul" and constant(node.inputs[0]) is not None else 1


def _unknown(node: ir.Node, what: str, value: ir.Value | None) -> str:
    why = why_not_constant(value) if value is not None else "it has none"
    return f"the {what} of {label(node)} is not known: {why}"


def _matmul(node: ir.Node, weight: torch.Tensor) -> Weights:
    if weight.ndim != 2:
        raise BlockedError(f"the weight of {label(node)} has {weight.ndim} dimensions")
    if weight_place(node) == 0:
        return Weights(weight, None, Layout(), -2)
    return Weights(weight, None, Layout(transposed=True), -1)


def _gemm(node: ir.Node, weight: torch.Tensor, bias: torch.Tensor | None) -> Weights:
    transposed = not _attribute(node, "transB", 0)
    weight = weight.double() * _attribute(node, "alpha", 1.0)
    if bias is not None:
        outputs = weight.shape[1 if transposed else 0]
        if bias.ndim > 1 and any(size != 1 for size in bias.shape[:-1]):
            raise BlockedError(f"the bias of {label(node)} differs from row to row")
        bias = (bias.double() * _attribute(node, "beta", 1.0)).reshape(-1).expand(outputs)
    return Weights(weight, bias, Layout(transposed=transposed), _CHANNEL_AXIS)


def _attribute(node: ir.Node, name: str, default: float) -> float:
    if name not in node.attributes:
        return default
    value: float = node.attributes[name].value
    return value


def plan_after(node: ir.Node, affine: Affine, numbers: torch.Tensor) -> Callable[[], None]:
    """Return the edit that lets a node do what a map after it does.

    Raises:
        BlockedError: The channels do not lie along the node's output channels, or its weights do
            not allow it.
        BnconvertError: A new weight is not finite.
    """
    if node.op_type == "BatchNormalization":
        return _plan_norm(node, affine, numbers)
    weights = read_weights(node)
    taken = affine.take(_along(node, numbers, weights.axis, weights.outputs))
    return _store(node, *absorb_after(weights.weight, weights.bias, taken, weights.layout))


def plan_before(node: ir.Node, affine: Affine, numbers: torch.Tensor) -> Callable[[], None]:
    """Return the edit that lets a node do what a map before it does; errors as `plan_after`."""
    if node.op_type not in {"Conv", "Gemm", "MatMul"}:
        raise BlockedError(f"its reader {label(node)} does not take it up")
    weights = read_weights(node)
    if node.op_type == "Gemm" and _attribute(node, "transA", 0):
        raise BlockedError(f"its reader {label(node)} transposes its input")
    taken = affine.take(_along(node, numbers, weights.axis, weights.inputs))
    padded = node.op_type == "Conv" and is_padded(node, weights.weight.shape[2:])
    if padded and bool((taken.shift != 0).any()):
        raise BlockedError(f"its reader {label(node)} pads with zeros")
    return _store(node, *absorb_before(weights.weight, weights.bias, taken, weights.layout))


def _along(node: ir.Node, numbers: torch.Tensor, axis: int, channels: int) -> torch.Tensor:
    found = along(numbers, axis, channels) if numbers.ndim >= -axis else None
    if found is None:
        raise BlockedError(f"its channels do not lie along those of {label(node)}")
    return found


def _plan_norm(node: ir.Node, affine: Affine, numbers: torch.Tensor) -> Callable[[], None]:
    """`after.scale * (g * n + b) + after.shift`: only weight and bias of the first norm change."""
    weight, bias = constant(node.inputs[1]), constant(node.inputs[2])
    if weight is None or bias is None:
        raise BlockedError(_unknown(node, "weight", node.inputs[1 if weight is None else 2]))
    taken = affine.take(_along(node, numbers, _CHANNEL_AXIS, len(weight)))
    own = Affine(weight.double(), bias.double()).then(taken)
    return _store(node, own.scale, own.shift)


def _store(node: ir.Node, weight: torch.Tensor, bias: torch.Tensor) -> Callable[[], None]:
    place = weight_place(node)
    old = node.inputs[place]
    assert old is not None  # noqa: S101 (`read_weights` has read it)
    assert old.const_value is not None  # noqa: S101
    dtype = torch.from_numpy(np.array(old.const_value.numpy())).dtype
    new_weight = cast(weight, dtype, f"{label(node)}: its weight")
    new_bias = cast(bias, dtype, f"{label(node)}: its bias")

    def edit() -> None:
        graph = node.graph
        assert isinstance(graph, ir.Graph)  # noqa: S101 (only the main graph is folded)
        stem = node.name or node.outputs[0].name
        node.replace_input_with(place, add_initializer(graph, f"{stem}_weight", new_weight.numpy()))
        column = new_bias[:, None] if place == 0 else new_bias
        stored = add_initializer(graph, f"{stem}_bias", column.numpy())
        if node.op_type == "MatMul":
            if bool((new_bias != 0).any()):
                _add_after(graph, node, stored)
            return
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        node.replace_input_with(2, stored)
        if node.op_type == "Gemm":
            node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.0)
            node.attributes["beta"] = ir.AttrFloat32("beta", 1.0)

    return edit


def _add_after(graph: ir.Graph, node: ir.Node, bias: ir.Value) -> None:
    result = node.outputs[0]
    total = ir.Value(name=result.name, type=result.type, shape=result.shape)
    result.replace_all_uses_with(total, replace_graph_outputs=True)
    result.name = f"{total.name}{UNSHIFTED}"
    name = f"{total.name}/Add"
    graph.insert_after(node, ir.Node("", "Add", [result, bias], outputs=[total], name=name))
