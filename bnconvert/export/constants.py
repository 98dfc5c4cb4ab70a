"""Compute once what a program computes from its weights alone, such as standardized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bnconvert.fold.graph import Added, FoldGraph, is_tensor
from bnconvert.fold.rebuild import drop_unused, rebuild

if TYPE_CHECKING:
    from torch import fx
    from torch.export import ExportedProgram


def compute_constants(program: ExportedProgram) -> ExportedProgram:
    """Return a program that holds computed weights, rounded once from float64.

    Weights that are larger than those they are computed from, as expanded ones are, stay computed.
    """
    graph = FoldGraph(program)
    computed = [node for node in graph.graph.nodes if _is_worthwhile(graph, node)]
    if not computed:
        return program
    for node in computed:
        name = graph.names[_stored(graph, node)[0]]
        node.replace_all_uses_with(graph.add_constant(Added(graph.value(node), name), like=node))
    drop_unused(graph)
    return rebuild(graph)


def _is_worthwhile(graph: FoldGraph, node: fx.Node) -> bool:
    if not (_is_computed(graph, node) and is_tensor(node)):
        return False
    readers = list(node.users)
    if all(_is_computed(graph, reader) for reader in readers):
        return False
    if any(reader.op == "output" for reader in readers):
        return False
    if not node.meta["val"].is_floating_point():
        return False
    room = sum(_bytes(source) for source in _stored(graph, node))
    return 0 < _bytes(node) <= room


def _bytes(node: fx.Node) -> int:
    fake = node.meta["val"]
    return int(fake.numel()) * int(fake.itemsize)


def _is_computed(graph: FoldGraph, node: fx.Node) -> bool:
    """Whether a node's value comes from weights alone and is not only a view of one."""
    if node.op == "placeholder" or not graph.is_constant(node):
        return False
    target = node.target
    is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
    return not is_view or any(_is_computed(graph, source) for source in node.all_input_nodes)


def _stored(graph: FoldGraph, node: fx.Node) -> list[fx.Node]:
    """Return the weights that a constant node is computed from."""
    seen, waiting = {node}, [node]
    while waiting:
        sources = set(waiting.pop().all_input_nodes) - seen
        seen |= sources
        waiting += sources
    return [each for each in graph.names if each in seen]
