"""Fold the BatchNormalization nodes of an ONNX graph into the operators around them.

Each norm is tried backward, into what computes its input, then forward, into everything that reads
it. On the way its channels are followed through operators that only move data, and additions and
multiplications by a constant per channel are taken up as well.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from onnx_ir.passes import common

from bnconvert.export.onnx_constants import compute_weights, why_not_constant
from bnconvert.export.onnx_parts import (
    PARTS,
    before_concat,
    part_of,
    through_concat,
    whole_of,
)
from bnconvert.export.onnx_paths import (
    MOVERS,
    BlockedError,
    Shapes,
    check_passage,
    follow,
    label,
    shape_of,
)
from bnconvert.export.onnx_sites import SITES, constant, plan_after, plan_before, weight_place
from bnconvert.fold.algebra import Affine, batchnorm_affine, cast
from bnconvert.fold.channels import UNTOUCHED, by_channel, channel_map
from bnconvert.report import LayerReport, Outcome, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir
    from torch import Tensor

_CHANNEL_AXIS = 1
_NORM = "BatchNormalization"
_OPTIONAL_INITIALIZER_INPUTS = 4  # since this version of the file format
_EPSILON = torch.tensor(1e-5).item()  # attributes are float32, their defaults too
_PER_CHANNEL = 9  # since this opset, statistics are per channel by definition
_BROADCASTS = 7  # since this opset, Add and Gemm broadcast as they do now


def fold_graph(model: ir.Model, shapes: Shapes) -> Report:
    """Fold a graph in place and return what became of each BatchNormalization node.

    Constants become initializers, whatever the number of norms.

    Args:
        model: The graph.
        shapes: Shape of each value between its nodes in one run.

    Raises:
        BnconvertError: A folded weight is not finite; the graph is then unusable.
    """
    if model.ir_version < _OPTIONAL_INITIALIZER_INPUTS:  # they had to be inputs as well
        common.RemoveInitializersFromInputsPass()(model)
        model.ir_version = _OPTIONAL_INITIALIZER_INPUTS
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    compute_weights(model, SITES | MOVERS | PARTS)
    entries: dict[ir.Node, LayerReport] = {}
    norms = [node for node in model.graph if node.op_type == _NORM and not node.domain]
    progress = True
    while progress:
        progress = False
        for node in norms:
            if node in entries and entries[node].outcome is Outcome.FOLDED:
                continue
            entries[node] = _fold_node(model, node, shapes)
            progress |= entries[node].outcome is Outcome.FOLDED
    common.RemoveUnusedNodesPass()(model)
    layers = [entries[node] for node in norms] + _in_branches(model)
    return Report("fold-onnx", tuple(layers))


def _in_branches(model: ir.Model) -> list[LayerReport]:
    main = set(model.graph)
    return [
        LayerReport(_name(node), _NORM, Outcome.LEFT, reason="it is inside a branch of the graph")
        for node in model.graph.all_nodes()
        if node.op_type == _NORM and node not in main
    ]


def _name(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or ""


def _fold_node(model: ir.Model, node: ir.Node, shapes: Shapes) -> LayerReport:
    name, reasons = _name(node), []
    try:
        affine = _affine(model, node)
    except BlockedError as blocked:
        return LayerReport(name, _NORM, Outcome.LEFT, reason=str(blocked))
    for way in (_plan_backward, _plan_forward):
        try:
            edits, into = way(node, affine, shapes)
        except BlockedError as blocked:
            reasons.append(str(blocked))
            continue
        for edit in edits:
            edit()
        _bypass(node)
        return LayerReport(name, _NORM, Outcome.FOLDED, now=into)
    return LayerReport(name, _NORM, Outcome.LEFT, reason="; ".join(dict.fromkeys(reasons)))


def _affine(model: ir.Model, node: ir.Node) -> Affine:
    version = model.opset_imports.get("", 1)
    if version < _BROADCASTS:
        raise BlockedError(
            f"opset {version} broadcasts by other rules; convert the file to opset {_PER_CHANNEL} "
            "or higher"
        )
    spatial = node.attributes["spatial"].as_int() if "spatial" in node.attributes else 1
    if version < _PER_CHANNEL and not spatial:
        raise BlockedError("its statistics are per value and not per channel (spatial=0)")
    if "training_mode" in node.attributes and node.attributes["training_mode"].as_int():
        raise BlockedError("it is in training mode and normalises by the batch")
    if any(output.name for output in node.outputs[1:]):
        raise BlockedError("it gives the batch's statistics, so it is in training mode")
    scale, bias, mean, var = (constant(value) for value in node.inputs[1:5])
    if scale is None or bias is None or mean is None or var is None:
        unknown = next(v for v in node.inputs[1:5] if v is not None and constant(v) is None)
        raise BlockedError(f"its weights or statistics are not known: {why_not_constant(unknown)}")
    eps = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else _EPSILON
    affine = batchnorm_affine(mean, var, eps, scale, bias)
    for part, values in (("scale", affine.scale), ("shift", affine.shift)):
        cast(values, torch.float64, f"{label(node)}: its {part}")
    return affine


def _bypass(node: ir.Node) -> None:
    """Let everything read a node's input in place of its output, which keeps its name."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None  # noqa: S101 (a norm has an input)
    if result.is_graph_output():
        source.name, result.name = result.name, f"{result.name}_folded"
        source.type, source.shape = source.type or result.type, source.shape or result.shape
    result.replace_all_uses_with(source, replace_graph_outputs=True)
    graph = node.graph
    if graph is not None:
        graph.remove(node, safe=True)


_Plan = tuple[list["Callable[[], None]"], str]


def _plan_backward(node: ir.Node, affine: Affine, shapes: Shapes) -> _Plan:
    numbers = _channels_of(node, affine, shapes)
    edits: list[Callable[[], None]] = []
    into: list[str] = []
    seen: set[ir.Node] = set()
    pending = [(node, node.inputs[0], affine, numbers)]
    while pending:
        reader, value, affine, numbers = pending.pop()
        producer = value.producer() if value is not None else None
        if value is None or producer is None:
            raise BlockedError("its input is an input of the graph")
        _check_only_reader(value, producer, reader)
        if producer in seen:
            raise BlockedError(f"{label(producer)} is reached on two ways")
        seen.add(producer)
        if producer.op_type in SITES and not producer.domain:
            edits.append(plan_after(producer, affine, numbers))
            into.append(label(producer))
        elif (moved := _arithmetic(producer, numbers, len(affine.scale), shapes)) is not None:
            source, own = moved
            pending.append((producer, source, own.then(affine), numbers))
            edits.append(functools.partial(_skip, producer, producer.inputs.index(source)))
        elif (sources := _passed_back(producer, value, affine, numbers, shapes)) is not None:
            pending += [(producer, *source) for source in reversed(sources)]
        else:
            raise BlockedError(
                f"its input comes from {label(producer)}, which lets no map per channel through"
            )
    return edits, f"into {', '.join(into)}"


def _channels_of(norm: ir.Node, affine: Affine, shapes: Shapes) -> Tensor:
    rank = len(shape_of(norm.inputs[0], shapes))
    if rank <= _CHANNEL_AXIS:
        raise BlockedError("its input has no channels")
    return channel_map(rank, _CHANNEL_AXIS, len(affine.scale))


def _passed_back(
    producer: ir.Node, value: ir.Value, affine: Affine, numbers: Tensor, shapes: Shapes
) -> list[tuple[ir.Value | None, Affine, Tensor]] | None:
    """Return the inputs of a producer that a map of its output moves to; None if it is other.

    Raises:
        BlockedError: It is one that passes maps, and this map or its channels cannot pass it.
    """
    if producer.op_type in MOVERS:
        check_passage(producer, affine)
        given = follow(producer, numbers, shapes, backward=True)
        return [(producer.inputs[0], affine, given)]
    if producer.op_type in PARTS:
        whole = whole_of(producer, producer.outputs.index(value), numbers, shapes)
        return [(producer.inputs[0], affine, whole)]
    if producer.op_type == "Concat":
        parts = range(len(producer.inputs))
        tracks = [before_concat(producer, index, numbers, shapes) for index in parts]
        return [(s, affine, t) for s, t in zip(producer.inputs, tracks, strict=True)]
    terms = _terms(producer, shapes)
    if terms is None:
        return None
    return [(t, affine if t is terms[0] else affine.scale_only, numbers) for t in terms]


def _check_only_reader(value: ir.Value, producer: ir.Node, reader: ir.Node) -> None:
    if value.is_graph_output():
        raise BlockedError(f"the output of {label(producer)} is also an output of the graph")
    others = [use.node for use in value.uses() if use.node is not reader]
    if others:
        raise BlockedError(f"the output of {label(producer)} is also read by {label(others[0])}")
    if len(value.uses()) > 1:
        raise BlockedError(f"{label(reader)} reads the output of {label(producer)} twice")


def _terms(node: ir.Node, shapes: Shapes) -> list[ir.Value] | None:
    """Return the terms of a sum, each as large as the sum; None for anything else."""
    if node.op_type not in {"Add", "Sum"}:
        return None
    terms = [value for value in node.inputs if value is not None]
    whole = shape_of(node.outputs[0], shapes)
    same = all(shape_of(term, shapes) == whole and constant(term) is None for term in terms)
    return terms if same and len(terms) == len(node.inputs) else None


def _arithmetic(
    node: ir.Node, numbers: Tensor, count: int, shapes: Shapes
) -> tuple[ir.Value, Affine] | None:
    """Return the varying input of a sum, product or quotient with a constant, and its map.

    Returns:
        None for anything else, where the constant differs within a channel, and where other
        values than the norm's pass through it.
    """
    if bool((numbers == UNTOUCHED).any()):  # it also changes channels that are not the norm's
        return None
    one, zero = torch.ones(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    if node.op_type == "Neg" and node.inputs[0] is not None:
        return node.inputs[0], Affine(-one, zero)
    if node.op_type not in {"Add", "Sub", "Mul", "Div"}:
        return None
    values = [constant(value) for value in node.inputs]
    index = next((i for i, value in enumerate(values) if value is None), 0)
    number, source = values[1 - index], node.inputs[index]
    if number is None or source is None or values[index] is not None:
        return None
    shape = shape_of(source, shapes)
    if shape != shape_of(node.outputs[0], shapes):
        return None
    c = by_channel(number.double(), numbers, count) if number.ndim <= numbers.ndim else None
    if c is None or (node.op_type == "Div" and (index == 1 or not c.all())):
        return None
    if node.op_type == "Sub":
        return source, Affine(one, -c) if index == 0 else Affine(-one, c)
    maps = {"Add": Affine(one, c), "Mul": Affine(c, zero), "Div": Affine(1.0 / c, zero)}
    return source, maps[node.op_type]


def _data(site: ir.Node) -> int:
    """Return which input of a site is not its weight."""
    return 1 - weight_place(site) if site.op_type == "MatMul" else 0


def _skip(node: ir.Node, index: int) -> None:
    """Let everything read one input of a node, as it now is, in place of its output."""
    source = node.inputs[index]
    assert source is not None  # noqa: S101 (the operand that varies)
    node.outputs[0].replace_all_uses_with(source)
    graph = node.graph
    if graph is not None:
        graph.remove(node, safe=True)


def _passed_on(
    reader: ir.Node, place: int, affine: Affine, numbers: Tensor, shapes: Shapes
) -> list[tuple[ir.Value, Tensor]] | None:
    """Return the outputs on which a reader passes the channels of one input; None if it is other.

    Raises:
        BlockedError: It is one that does, and the map or the channels cannot pass it.
    """
    if reader.op_type in MOVERS and place == 0:
        check_passage(reader, affine)
        return [(reader.outputs[0], follow(reader, numbers, shapes, backward=False))]
    if reader.op_type in PARTS and place == 0:
        return [
            (output, part_of(reader, place, numbers, shapes))
            for place, output in enumerate(reader.outputs)
            if output.uses() or output.is_graph_output()
        ]
    if reader.op_type == "Concat":
        return [(reader.outputs[0], through_concat(reader, place, numbers, shapes))]
    return None


def _plan_forward(node: ir.Node, affine: Affine, shapes: Shapes) -> _Plan:
    result = node.outputs[0]
    numbers = _channels_of(node, affine, shapes)
    edits: list[Callable[[], None]] = []
    into: dict[ir.Node, str] = {}
    pending = [(result, affine, numbers)]
    while pending:
        value, affine, numbers = pending.pop()
        if value.is_graph_output():
            raise BlockedError("its result is an output of the graph")
        if not value.uses():
            raise BlockedError("nothing reads its result")
        for use in value.uses():
            reader = use.node
            passed = _passed_on(reader, use.idx, affine, numbers, shapes)
            if passed is not None:
                pending += [(output, affine, moved) for output, moved in passed]
            elif reader.op_type in SITES and not reader.domain and use.idx == _data(reader):
                if reader in into:
                    raise BlockedError(f"its reader {label(reader)} is reached on two ways")
                edits.append(plan_before(reader, affine, numbers))
                into[reader] = label(reader)
            elif (own := _arithmetic(reader, numbers, len(affine.scale), shapes)) is not None:
                pending.append((reader.outputs[0], affine.then(own[1]), numbers))
                edits.append(functools.partial(_skip, reader, use.idx))
            else:
                raise BlockedError(f"its reader {label(reader)} lets no map per channel through")
    return edits, f"forward into {', '.join(into.values())}"
