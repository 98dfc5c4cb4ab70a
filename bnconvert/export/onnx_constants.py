"""Weights that an ONNX graph computes from constants, such as by Cast or Identity, made constants.

Only what a norm or an operator that can take one up reads is computed; everything else stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

if TYPE_CHECKING:
    from collections.abc import Collection

_QUANTISED = frozenset({"DequantizeLinear", "DequantizeBFP"})
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"}
    | {"RandomUniform", "RandomUniformLike"}
)
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})


def compute_weights(model: ir.Model, readers: Collection[str]) -> None:
    """Give nodes constants for what they read that follows from constants alone.

    Args:
        model: Changed in place; its constants are initializers, its nodes in order.
        readers: Operators whose inputs are computed.
    """
    constants = _Constants(model)
    stored: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.domain or node.op_type not in {*readers, *_ARITHMETIC}:
            continue
        for index, value in enumerate(node.inputs):
            if value is None or value not in constants.fixed:
                continue
            if value not in stored:
                array = constants.compute(value)
                if array is None:
                    continue
                name = f"{value.name}_computed"
                stored[value] = add_initializer(model.graph, name, array)
            node.replace_input_with(index, stored[value])


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the values of a constant, or None for anything else.

    An initializer that is also an input of the graph is none: a caller may replace it.
    """
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def why_not_constant(value: ir.Value) -> str:
    """Return why the values are not known, as a sentence that starts with the value's name."""
    if value.is_graph_input() and value.const_value is not None:
        return (
            f"{value.name} is an input of the graph as well, so that a caller may replace it; "
            "remove it from the inputs"
        )
    if value.producer() is None:
        return f"{value.name} is an input of the graph"
    nodes = _ancestors(value)
    if any(node.op_type in _QUANTISED for node in nodes):
        return f"{value.name} is quantised"
    if any(given is not None and given.is_graph_input() for n in nodes for given in n.inputs):
        return f"{value.name} is computed from the graph's inputs"
    return f"{value.name} is computed, by operators that cannot be computed beforehand"


class _Constants:
    """What a graph computes from constants alone.

    Attributes:
        fixed: The results that depend on nothing else.
    """

    def __init__(self, model: ir.Model) -> None:
        self._opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
        self._arrays: dict[ir.Value, np.ndarray | None] = {}
        self.fixed: set[ir.Value] = set()
        for node in model.graph:
            given = [value for value in node.inputs if value is not None]
            if given and _is_deterministic(node) and all(map(self._is_known, given)):
                self.fixed.update(node.outputs)

    def _is_known(self, value: ir.Value) -> bool:
        return value in self.fixed or (value.const_value is not None and not value.is_graph_input())

    def compute(self, value: ir.Value) -> np.ndarray | None:
        """Return the values of a fixed result; None where onnx's reference does not run."""
        for node in _ancestors(value):
            if any(output not in self._arrays for output in node.outputs):
                results = self._run(node)
                self._arrays.update(zip(node.outputs, results, strict=True))
        return self._arrays[value]

    def _run(self, node: ir.Node) -> list[Any]:
        given = {v.name or "": self._array(v) for v in node.inputs if v is not None}
        try:
            graph = onnx.helper.make_graph(
                [ir.serde.serialize_node(node)],
                "weights",
                [onnx.ValueInfoProto(name=name) for name in given],
                [onnx.ValueInfoProto(name=output.name) for output in node.outputs],
            )
            proto = onnx.helper.make_model(graph, opset_imports=self._opsets)
            return [np.asarray(array) for array in ReferenceEvaluator(proto).run(None, given)]
        except Exception:  # the reference raises whatever its operators raise
            return [None] * len(node.outputs)

    def _array(self, value: ir.Value) -> np.ndarray | None:
        stored = value.const_value
        return self._arrays[value] if stored is None else np.array(stored.numpy())


def _ancestors(value: ir.Value) -> list[ir.Node]:
    """Return the nodes that a value is computed by, producers before their readers."""
    order: dict[ir.Node, None] = {}
    entered: set[ir.Node] = set()
    waiting = [value.producer()]
    while waiting:
        node = waiting[-1]
        if node is None or node in entered:
            waiting.pop()
            if node is not None:
                order.setdefault(node)
            continue
        entered.add(node)
        waiting += [given.producer() for given in node.inputs if given is not None]
    return list(order)


def _is_deterministic(node: ir.Node) -> bool:
    has_body = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
    return not (node.domain or has_body or node.op_type in _QUANTISED | _RANDOM)


def add_initializer(graph: ir.Graph, name: str, values: np.ndarray) -> ir.Value:
    """Add an initializer under a name that is free."""
    results = {value.name for node in graph for value in node.outputs}
    taken = results | {value.name for value in graph.inputs} | graph.initializers.keys()
    free, number = name, 1
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    tensor = ir.tensor(np.ascontiguousarray(values), name=free)
    made = ir.Value(
        name=free,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(values.shape),
        const_value=tensor,
    )
    graph.register_initializer(made)
    return made
