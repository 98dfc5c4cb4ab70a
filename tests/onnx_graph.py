"""Small ONNX graphs for the tests of `fold_onnx`."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from pathlib import Path

NORM = "BatchNormalization"
C = 6


class Graph:
    """Collects the nodes of a small graph; `call` returns the name of a node's result."""

    def __init__(self, seed: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(zlib.crc32(seed.encode()))

    def weight(self, *shape: int, low: float = -1.0, high: float = 1.0) -> str:
        values = self._random.uniform(low, high, shape).astype(np.float32)
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def ints(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def floats(self, *values: float) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, np.float32), name))
        return name

    def call(self, op: str, *inputs: str, **attributes: Any) -> str:
        result = f"v{len(self.nodes)}"
        node = helper.make_node(op, inputs, [result], name=f"n{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        return result

    def norm(self, value: str, channels: int = C, positive: bool = False) -> str:
        weight = self.weight(channels, low=0.1 if positive else -1.0)
        self.weights[-1].raw_data = self._with_zero(self.weights[-1])
        bias, mean = self.weight(channels), self.weight(channels)
        return self.call(NORM, value, weight, bias, mean, self.weight(channels, low=0.3, high=2.0))

    def _with_zero(self, tensor: onnx.TensorProto) -> bytes:
        values = numpy_helper.to_array(tensor).copy()
        values[0] = 0.0
        return bytes(values.tobytes())

    def save(
        self,
        path: Path,
        outputs: list[str],
        shape: tuple[Any, ...] = ("batch", C, 8, 8),
        opset: int = 17,
        as_constants: bool = False,
    ) -> Path:
        nodes, weights = self.nodes, self.weights
        if as_constants:
            made = [helper.make_node("Constant", [], [w.name], value=w) for w in weights]
            nodes, weights = [*made, *nodes], []
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            weights,
        )
        imports = [helper.make_opsetid("", opset)]
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
        return path


def count(path: Path, op: str = NORM) -> int:
    return sum(node.op_type == op for node in onnx.load(path).graph.node)


def conv(g: Graph, x: str, out: int = C, inputs: int = C, group: int = 1, **kw: Any) -> str:
    bias = () if kw.pop("no_bias", False) else (g.weight(out),)
    kernel = kw.pop("kernel", 3)
    weight = g.weight(out, inputs // group, kernel, kernel)
    return g.call("Conv", x, weight, *bias, group=group, **kw)
