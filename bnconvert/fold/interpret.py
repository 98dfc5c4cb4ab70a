"""Running a captured graph in float64, with the constants that folding added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from bnconvert.fold.float64 import in_float64
from bnconvert.fold.graph import operation
from bnconvert.fold.inplace import WRITTEN

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from bnconvert.fold.graph import FoldGraph


def user_inputs(program: ExportedProgram) -> list[Any]:
    """Return the flattened inputs of a program: its examples, or random values of their shape."""
    if program.example_inputs is not None:
        return pytree.tree_leaves(program.example_inputs)
    names = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    }
    placeholders = program.graph.find_nodes(op="placeholder")
    generator = torch.Generator().manual_seed(0)
    return [_random(node, generator) for node in placeholders if node.name in names]


def _random(node: fx.Node, generator: torch.Generator) -> Any:
    fake = node.meta.get("val")
    if not isinstance(fake, Tensor):
        return fake
    shape = [size if isinstance(size, int) else size.node.hint for size in fake.shape]
    if fake.is_floating_point():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(fake.device, fake.dtype)
    return torch.zeros(shape, dtype=fake.dtype, device=fake.device)


def run_in_float64(
    graph: FoldGraph, inputs: list[Any], computed: dict[str, Any] | None = None
) -> Any:
    """Run a graph with all floating point values in float64.

    Args:
        graph: The graph, as captured or with edits.
        inputs: The user inputs, flattened.
        computed: Filled with the value of each operation by the name of its node, if given.

    Returns:
        The output.
    """
    remaining = iter(inputs)
    values = []
    for node in graph.graph.find_nodes(op="placeholder"):
        if graph.is_constant(node):
            fake = node.meta.get("val")
            value = graph.value(node)
            value = value.clone() if WRITTEN in node.meta else value
            values.append(value.to(fake.device) if isinstance(fake, Tensor) else value)
        else:
            value = next(remaining)
            wide = isinstance(value, Tensor) and value.is_floating_point()
            values.append(value.double() if wide else value)
    module = fx.GraphModule(graph.program.graph_module, graph.graph)
    with in_float64():
        return _Interpreter(module, computed).run(*values)


class _Interpreter(fx.Interpreter):
    """Skips the checks of dtypes that a captured graph holds, and keeps what is asked for."""

    def __init__(self, module: fx.GraphModule, computed: dict[str, Any] | None) -> None:
        super().__init__(module)
        self._computed = computed

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if operation(n) == "_assert_tensor_metadata":
            return None
        value = super().run_node(n)
        if self._computed is not None and n.op == "call_function":
            self._computed[n.name] = value
        return value
