"""Weights that an ONNX graph computes from constants, such as by Cast or Identity, made constants.

Only what a norm or an operator that can take one up reads is computed; everything else stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_QUANTISED = frozenset({"DequantizeLinear", "DequantizeBFP"})
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"}
    | {"RandomUniform", "RandomUniformLike"}
)
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})


def compute_weights(model: ir.Model, readers: Collection[str]) -> None:
    """Give nodes constants for what they read that follows from constants alone.

    Args:
        model: Changed in place; its constants are initializers.
        readers: Operators whose inputs are computed.
    """
    graph = model.graph
    computed: dict[ir.Value, ir.Value | None] = {}
    for node in list(graph):
        if node.domain or node.op_type not in {*readers, *_ARITHMETIC}:
            continue
        for index, value in enumerate(node.inputs):
            if value is None or value.const_value is not None or value.producer() is None:
                continue
            if value not in computed:
                computed[value] = _compute(model, value)
            result = computed[value]
            if result is not None:
                node.replace_input_with(index, result)


def why_not_constant(value: ir.Value) -> str:
    """Return why the values are not known, to follow what they are: "is computed"."""
    if value.is_graph_input() and value.const_value is not None:
        return (
            f"{value.name} is an input of the graph as well, so that a caller may replace it; "
            "remove it from the inputs"
        )
    if value.producer() is None:
        return f"{value.name} is an input of the graph"
    if any(node.op_type in _QUANTISED for node in _ancestors(value)):
        return f"{value.name} is quantised"
    return f"{value.name} is computed from the graph's inputs"


def _compute(model: ir.Model, value: ir.Value) -> ir.Value | None:
    """Return an initializer with the values of a result, None where they depend on inputs."""
    nodes = list(_ancestors(value))
    if not nodes or not all(map(_is_deterministic, nodes)):
        return None
    sources = {source for node in nodes for source in node.inputs if source is not None}
    stored = [source for source in sources if source.producer() is None]
    if any(source.const_value is None or source.is_graph_input() for source in stored):
        return None
    feed = {source.name or "": np.array(_array(source)) for source in stored}
    nodes.sort(key=list(model.graph).index)
    body = onnx.helper.make_graph(
        [ir.serde.serialize_node(node) for node in nodes],
        "weights",
        [onnx.ValueInfoProto(name=name) for name in feed],
        [onnx.ValueInfoProto(name=value.name)],
    )
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    try:
        proto = onnx.helper.make_model(body, opset_imports=opsets)
        (array,) = ReferenceEvaluator(proto).run(None, feed)
    except (
        Exception
    ):  # the reference raises whatever its operators raise; the weight stays computed
        return None
    return add_initializer(model.graph, f"{value.name}_computed", np.asarray(array))


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None  # noqa: S101 (the caller has looked)
    return value.const_value.numpy()


def _ancestors(value: ir.Value) -> Iterator[ir.Node]:
    seen: set[ir.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [source for source in node.inputs if source is not None]


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
