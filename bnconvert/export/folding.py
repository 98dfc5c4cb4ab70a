"""Fold a captured program, and note what became of the outputs of its layers.

A layer that folding gave other weights no longer gives its old output, and neither does anything
between it and the norm. Where the file is compared with the model layer by layer, these are left
out, and a folded norm gives the value of the operation before it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bnconvert.comparison.layerwise import FOLDED_KEY, MOVED_KEY
from bnconvert.fold import plan_fold_exported
from bnconvert.fold.graph import FoldGraph
from bnconvert.fold.norms import NormCall, find_norms, path_of

if TYPE_CHECKING:
    from torch import fx
    from torch.export import ExportedProgram

    from bnconvert.fold import ExportedPlan, FoldReport


def fold_program(
    program: ExportedProgram, rewrite_activations: bool
) -> tuple[ExportedProgram, FoldReport, dict[str, str]]:
    """Return the folded program, what became of each norm, and metadata about layer outputs.

    Raises:
        BnconvertError: A layer has values that are not finite.
        VerificationError: The folded program differs from the original in float64.
    """
    plan = plan_fold_exported(program, rewrite_activations=rewrite_activations)
    return plan.apply(), plan.report, _layer_entries(program, plan)


def _layer_entries(program: ExportedProgram, plan: ExportedPlan) -> dict[str, str]:
    graph = FoldGraph(program)
    readers = {node.name: _reader_names(node) for node in plan.apply().graph.nodes}
    last = _last_nodes(graph)
    folded: dict[str, str] = {}
    changed: set[fx.Node] = set()
    for call in find_norms(graph)[0]:
        if call.path not in plan.ways:
            continue
        way = plan.ways[call.path]
        forward = way in {"forward", "split"}
        if way in {"backward", "split"}:
            changed |= _between(graph, call.source, forward=False)
        if forward:
            changed |= _after(graph, call)
        source = path_of(call.source)
        replaced = _reader_names(call.node) <= readers.get(call.source.name, set())
        own = last.get(call.path) is call.node and last.get(source) is call.source
        if not forward and replaced and own:
            folded[call.path] = source
        else:
            changed.add(call.node)
    moved = [name for name, node in last.items() if node in changed and name not in folded]
    return {FOLDED_KEY: json.dumps(folded), MOVED_KEY: json.dumps(moved)}


def _reader_names(node: fx.Node) -> set[str]:
    return {reader.name for reader in node.users}


def _last_nodes(graph: FoldGraph) -> dict[str, fx.Node]:
    """Return the node that gives each layer's output, by the layer's name."""
    last: dict[str, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and (path := path_of(node)):
            parts = path.split(".")
            for length in range(1, len(parts) + 1):
                last[".".join(parts[:length])] = node
    return last


def _after(graph: FoldGraph, call: NormCall) -> set[fx.Node]:
    readers = [reader for reader in call.node.users if not _has_weights(graph, reader)]
    return set().union(*(_between(graph, reader, forward=True) for reader in readers))


def _between(graph: FoldGraph, start: fx.Node, *, forward: bool) -> set[fx.Node]:
    """Return the nodes from `start` up to operations with weights, backward including these."""
    found: set[fx.Node] = set()
    pending = [start]
    while pending:
        node = pending.pop()
        if node in found or node.op != "call_function" or graph.is_constant(node):
            continue
        weights = _has_weights(graph, node)
        if weights and forward:
            continue
        found.add(node)
        if not weights:
            pending += node.users if forward else node.all_input_nodes
    return found


def _has_weights(graph: FoldGraph, node: fx.Node) -> bool:
    return any(graph.is_constant(argument) for argument in node.all_input_nodes)
