"""Turn a float32 graph into a float16 one that still takes and gives float32.

Weights are rounded once. A node stays in float32, with casts around it, when float16 cannot hold
what goes in or out of it on the proven inputs, when its operator does not take float16, or when it
sums up statistics. Inputs and outputs of the graph stay float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LARGEST = 65504.0
_SMALLEST = 2.0**-14  # below it, numbers lose digits, and at last become zero
_HEADROOM = 2.0  # other inputs than the proven ones may be larger
_STATISTICS = frozenset(
    {
        "BatchNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "ReduceMean",
        "ReduceSum",
        "ReduceSumSquare",
        "ReduceL2",
        "ReduceL1",
        "Softmax",
        "CumSum",
    }
)
_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def to_half(model: ir.Model, largest: Mapping[str, float]) -> list[str]:
    """Convert a graph in place.

    Args:
        model: A graph without control flow, in float32.
        largest: Largest absolute value of every float32 value by name, on the proven inputs.

    Returns:
        Names of the nodes kept in float32 because float16 cannot hold their values.

    Raises:
        BnconvertError: The graph has control flow.
    """
    graph = model.graph
    nodes = list(graph)
    for node in nodes:
        if any(
            attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attr in node.attributes.values()
        ):
            raise BnconvertError(
                f"dtype: {node.name} has branches of its own, which are not converted to float16; "
                "export in float32"
            )
    opset = model.opset_imports[""]
    overflowing = [node for node in nodes if _overflows(node, largest)]
    kept = {*overflowing, *(n for n in nodes if n.op_type in _STATISTICS or not _allows(n, opset))}
    for node in nodes:
        if node not in kept:
            _set_attributes(node)
            for value in _half_outputs(node, opset):
                value.type = ir.TensorType(_HALF)  # values may share the object of their type
    casts = _Casts(graph)
    for node in nodes:
        half = set() if node in kept else set(_half_inputs(node, opset))
        for index, source in enumerate(node.inputs):
            if source is not None and source.dtype in (_FLOAT, _HALF):
                wanted = _HALF if index in half else _FLOAT
                if source.dtype != wanted:
                    node.replace_input_with(index, casts.of(source, wanted))
    casts.restore_outputs()
    casts.drop_unused()
    return [node.name or node.op_type for node in overflowing]


def _overflows(node: ir.Node, largest: Mapping[str, float]) -> bool:
    """Whether something around a node is beyond float16: too large, or small throughout."""
    for value in (*node.inputs, *node.outputs):
        if value is None or value.dtype != _FLOAT:
            continue
        if value.const_value is not None:
            array = value.const_value.numpy()
            top = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
        else:
            top = largest.get(value.name or "", 0.0) * _HEADROOM
        if top > LARGEST or 0.0 < top < _SMALLEST:
            return True
    return False


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return None
    return onnx.defs.get_schema(node.op_type, opset)


def _allows(node: ir.Node, opset: int) -> bool:
    """Whether the operator takes float16 wherever it takes float32."""
    schema = _schema(node, opset)
    if schema is None:
        return False
    return all(
        "tensor(float16)" in constraint.allowed_type_strs
        for constraint in schema.type_constraints
        if "tensor(float)" in constraint.allowed_type_strs
    )


def _half_inputs(node: ir.Node, opset: int) -> Iterator[int]:
    """Indices of the inputs whose type may vary; others are float32 by definition, like scales."""
    schema = _schema(node, opset)
    for index, value in enumerate(node.inputs):
        if schema and value is not None and value.dtype in (_FLOAT, _HALF):
            formal = schema.inputs[min(index, len(schema.inputs) - 1)]
            if "tensor(float16)" in formal.types:
                yield index


def _half_outputs(node: ir.Node, opset: int) -> Iterator[ir.Value]:
    schema = _schema(node, opset)
    for index, value in enumerate(node.outputs):
        if schema and value.dtype == _FLOAT:
            formal = schema.outputs[min(index, len(schema.outputs) - 1)]
            if "tensor(float16)" in formal.types:
                yield value


def _set_attributes(node: ir.Node) -> None:
    """Make a node that states its result's type state float16."""
    for key in ("to", "dtype"):
        if key in node.attributes and node.attributes[key].as_int() == _FLOAT:
            node.attributes[key] = ir.AttrInt64(key, int(_HALF))
    if "value" in node.attributes and node.attributes["value"].type == ir.AttributeType.TENSOR:
        tensor = node.attributes["value"].as_tensor()
        if tensor.dtype == _FLOAT:
            half = ir.tensor(tensor.numpy().astype(np.float16), name=tensor.name)
            node.attributes["value"] = ir.AttrTensor("value", half)


class _Casts:
    """Values in the other of both types: rounded weights, and one cast for all readers."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._made: dict[ir.Value, ir.Value] = {}

    def of(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value in a dtype."""
        if value not in self._made:
            self._made[value] = self._constant(value) or self._cast(value, dtype)
        return self._made[value]

    def _constant(self, value: ir.Value) -> ir.Value | None:
        if value.const_value is None or not value.is_initializer():
            return None
        name = f"{value.name}_half"
        tensor = ir.tensor(value.const_value.numpy().astype(np.float16), name=name)
        made = ir.Value(name=name, type=ir.TensorType(_HALF), shape=value.shape, const_value=tensor)
        self._graph.register_initializer(made)
        return made

    def _cast(self, value: ir.Value, dtype: ir.DataType, name: str = "") -> ir.Value:
        name = name or f"{value.name}_as_{dtype.name.lower()}"
        out = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
        cast = ir.Node(
            "",
            "Cast",
            [value],
            [ir.AttrInt64("to", int(dtype))],
            outputs=[out],
            name=f"{name}/Cast",
        )
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], cast)
        else:
            self._graph.insert_after(producer, cast)
        return out

    def restore_outputs(self) -> None:
        """Put a cast to float32 before every output that became float16, under its name."""
        for index, output in enumerate(list(self._graph.outputs)):
            if output.dtype == _HALF:
                name, output.name = output.name or "", f"{output.name}_half"
                self._graph.outputs[index] = self._cast(output, _FLOAT, name)

    def drop_unused(self) -> None:
        """Remove the float32 weights that nothing reads any more."""
        for name, value in list(self._graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del self._graph.initializers[name]
