"""Putting folded weights into a graph, and making an exported program of the graph again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    TensorArgument,
)

from bnconvert.fold.algebra import batchnorm_affine, cast
from bnconvert.fold.graph import Added, FoldGraph, operation
from bnconvert.fold.norms import NormCall, path_of

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.fold.sites import Site

_PLACES = {"addmm": (2, 0), "mm": (1, None), "matmul": (1, None)}
"""Where an operation takes weight and bias, if not as second and third argument."""


def set_weights(graph: FoldGraph, site: Site) -> None:
    """Give a site's operation constants that hold its new weight and bias."""
    node = site.node
    weight_at, bias_at = _PLACES.get(operation(node), (1, 2))
    stem, trains = _stem(graph, site.weight, node), _trains(graph, site.weight)
    weight = graph.add_constant(
        Added(site.new_weight(), f"{stem}.weight", trains), like=site.weight
    )
    node.update_arg(weight_at, weight)
    values = site.new_bias()
    if values is None:
        return
    bias = graph.add_constant(Added(values, f"{stem}.bias", trains), like=site.weight)
    if bias_at is None:
        _add_after(graph, node, bias)
    elif len(node.args) <= bias_at:
        node.args = (*node.args, bias)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "bias"}
    else:
        node.update_arg(bias_at, bias)


def _trains(graph: FoldGraph, weight: fx.Node) -> bool:
    stored = graph.program.state_dict.get(graph.names.get(weight, ""))
    return isinstance(stored, nn.Parameter) and stored.requires_grad


def _add_after(graph: FoldGraph, node: fx.Node, bias: fx.Node) -> None:
    with graph.graph.inserting_after(node):
        total = graph.graph.call_function(torch.ops.aten.add.Tensor, (node, bias))
    total.meta.update(node.meta)
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def set_affine(graph: FoldGraph, call: NormCall) -> None:
    """Give a norm that stays constants that hold its changed map."""
    affine, node = call.affine, call.node
    stem = _stem(graph, node, node)
    if call.arithmetic:
        shape = [1] * len(graph.shape(node))
        shape[call.axis] = -1
        scale = graph.add_constant(Added(affine.scale.reshape(shape), f"{stem}.scale"), node)
        shift = graph.add_constant(Added(affine.shift.reshape(shape), f"{stem}.shift"), node)
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(torch.ops.aten.mul.Tensor, (call.source, scale))
        product.meta.update(node.meta)
        node.target, node.args = torch.ops.aten.add.Tensor, (product, shift)
        return
    if operation(node) == "getitem":
        node = node.all_input_nodes[0]
    mean, var = node.args[3], node.args[4]
    eps = node.args[7] if operation(node) in {"batch_norm", "instance_norm"} else node.args[6]
    bare = batchnorm_affine(graph.value(mean), graph.value(var), eps)  # type: ignore[arg-type]
    weight = affine.scale / bare.scale
    bias = affine.shift - bare.shift * weight
    assert isinstance(mean, fx.Node)  # noqa: S101 (a norm with statistics)
    node.update_arg(1, graph.add_constant(Added(weight, f"{stem}.weight"), like=mean))
    node.update_arg(2, graph.add_constant(Added(bias, f"{stem}.bias"), like=mean))


def _stem(graph: FoldGraph, weight: fx.Node, node: fx.Node) -> str:
    """Return the qualified name of the layer that new constants of a node belong to."""
    return graph.names.get(weight, "").rpartition(".")[0] or path_of(node) or node.name


def drop_unused(graph: FoldGraph) -> None:
    """Remove what no output depends on any more: operations, and weights that lost their readers.

    Weights that nothing read from the start stay, except those of a layer whose others go.
    """
    read = graph.read
    graph.graph.eliminate_dead_code(lambda node: node.op == "output" or _has_effect(node))
    owners = {_owner(graph.names[node]) for node in read if not node.users}
    for node in [*graph.names, *graph.added]:
        unused = node in graph.added or node in read or _is_counter(graph.names[node], owners)
        if unused and not node.users:
            graph.names.pop(node, None)
            graph.added.pop(node, None)
            graph.graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return True
    target = node.target
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    checks = operation(node).startswith(("_assert", "sym_constrain"))
    return mutable or checks or isinstance(target, torch._ops.HigherOrderOperator)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_counter(name: str, owners: set[str]) -> bool:
    return name.endswith("num_batches_tracked") and _owner(name) in owners


def rebuild(graph: FoldGraph) -> ExportedProgram:
    """Return an exported program of an edited graph; constants are cast to their dtypes here.

    Raises:
        BnconvertError: A new weight is not finite or overflows its dtype.
    """
    program = graph.program
    kept = {graph.names[node] for node in graph.names}
    state = {name: value for name, value in program.state_dict.items() if name in kept}
    old = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    specs = []
    for node in graph.graph.find_nodes(op="placeholder"):
        if node in graph.added:
            name = _unique(graph.added[node].target, {*state, *program.constants})
            state[name] = _stored(graph.added[node], node, name)
            specs.append(_spec(node, name, state[name]))
        else:
            specs.append(old[node.name])
    graph.graph.lint()
    return ExportedProgram(
        root=program.graph_module,
        graph=graph.graph,
        graph_signature=ExportGraphSignature(specs, _outputs(graph)),
        state_dict=state,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[program.verifier],
    )


def _unique(name: str, taken: set[str]) -> str:
    number = 0
    unique = name
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique


def _stored(added: Added, node: fx.Node, name: str) -> Tensor:
    fake = node.meta["val"]
    if added.bounds:
        return added.values.to(fake.device, fake.dtype)
    tensor = cast(added.values, fake.dtype, name).to(fake.device)
    return nn.Parameter(tensor) if added.trains else tensor


def _spec(node: fx.Node, name: str, value: Tensor) -> InputSpec:
    if isinstance(value, nn.Parameter):
        return InputSpec(InputKind.PARAMETER, TensorArgument(node.name), name)
    return InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=True)


def _outputs(graph: FoldGraph) -> list[Any]:
    """Return the output specifications with the names of the nodes that are now put out."""
    output = graph.graph.output_node()
    specs = []
    results: Any = output.args[0]
    for spec, node in zip(graph.program.graph_signature.output_specs, results, strict=True):
        tensor = isinstance(spec.arg, TensorArgument) and isinstance(node, fx.Node)
        arg = TensorArgument(node.name) if tensor else spec.arg
        specs.append(dataclasses.replace(spec, arg=arg))
    return specs
