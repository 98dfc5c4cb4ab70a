"""Norms of a graph: calls whose result is a per-channel affine map of their input.

Two forms are recognised: `batch_norm` with running statistics, as which InstanceNorm that tracks
them is written in eval mode too, and the plain arithmetic that frozen layers consist of,
`x * scale + shift` with constant factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.fold.algebra import Affine, batchnorm_affine
from bnconvert.fold.channels import channel_map
from bnconvert.fold.graph import is_tensor, operation

if TYPE_CHECKING:
    from torch import Tensor, fx

    from bnconvert.fold.graph import FoldGraph

_PLAIN = "batch_norm"
_INSTANCE = "instance_norm"  # with the same arguments; one of them is whether statistics are unused
_DECOMPOSED = "_native_batch_norm_legit_no_training"
_DECOMPOSED_TRAINING = {"_native_batch_norm_legit", "_native_batch_norm_legit_functional"}
_NO_STATISTICS = "it has no running statistics, so that it normalises by the batch in eval mode"
_TRAINING = "it was captured in training mode, where it normalises by the batch"


@dataclass(eq=False)
class NormCall:
    """One call of a norm.

    Attributes:
        node: The node whose value is the norm's result.
        source: The node whose value it normalises.
        reader: The node of the norm that reads `source`.
        axis: Dimension that holds the channels.
        affine: What the call does, including what was folded into it.
        path: Qualified name of the module that makes the call, "" outside any.
        type: Class name of that module, or the operation's name.
        changed: Whether anything was folded into the norm.
        arithmetic: Whether the norm is written as products and sums.
    """

    node: fx.Node
    source: fx.Node
    reader: fx.Node
    axis: int
    affine: Affine
    path: str
    type: str
    changed: bool = False
    arithmetic: bool = False

    def numbers(self, graph: FoldGraph) -> Tensor:
        """Return the channel map of its input and result."""
        return channel_map(len(graph.shape(self.node)), self.axis, len(self.affine.scale))

    def absorb_after(self, affine: Affine) -> None:
        """Fold a map of the result into the norm itself."""
        self.affine = self.affine.then(affine)
        self.changed = True


@dataclass(frozen=True)
class BatchCall:
    """A `batch_norm` that normalises by the batch's own statistics; it cannot be folded.

    Attributes:
        node: The call.
        path: Qualified name of the module that makes it, "" outside any.
        type: Class name of that module, or the operation's name.
        reason: Why it takes the batch's.
    """

    node: fx.Node
    path: str
    type: str
    reason: str


def stack_of(node: fx.Node) -> list[tuple[str, str]]:
    """Return (call, qualified name) of the modules a node was captured in, outermost first.

    The call tells apart several calls of one module.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return [(call, entry[0]) for call, entry in stack.items()]


def path_of(node: fx.Node) -> str:
    """Return the qualified name of the innermost module that a node was captured in."""
    stack = stack_of(node)
    return stack[-1][1] if stack else ""


def type_of(node: fx.Node) -> str:
    """Return the class name of the innermost module that a node was captured in."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    kind = list(stack.values())[-1][1]
    return kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__


def find_norms(graph: FoldGraph) -> tuple[list[NormCall], list[BatchCall]]:
    """Return the foldable norms in the order of the graph, and those that use batch statistics."""
    calls: list[NormCall] = []
    batch: list[BatchCall] = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or graph.is_constant(node):
            continue
        name = operation(node)
        if name == _INSTANCE and node.args[5]:
            continue
        if name in {_PLAIN, _INSTANCE}:
            _, weight, bias, mean, var, training, _, eps, *_ = node.args
            if training or mean is None or var is None:
                reason = _NO_STATISTICS if mean is None or var is None else _TRAINING
                batch.append(BatchCall(node, path_of(node), _type(node), reason))
            else:
                calls.append(_batchnorm(graph, node, node, weight, bias, mean, var, eps))
        elif name in _DECOMPOSED_TRAINING:
            batch.append(BatchCall(node, path_of(node), _type(node), _TRAINING))
        elif name == _DECOMPOSED:
            _, weight, bias, mean, var, _, eps = node.args
            result = next((user for user in node.users if user.args[1] == 0), None)
            if result is not None:
                calls.append(_batchnorm(graph, node, result, weight, bias, mean, var, eps))
        elif (call := _arithmetic(graph, node)) is not None:
            calls.append(call)
    return calls, batch


def _type(node: fx.Node) -> str:
    """Return the class of a norm's module; a functional norm is called by its operation."""
    name = type_of(node)
    return name if "norm" in name.lower() or "BN" in name else operation(node)


def _batchnorm(
    graph: FoldGraph,
    node: fx.Node,
    result: fx.Node,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    eps: float,
) -> NormCall:
    values = [None if item is None else graph.value(item) for item in (weight, bias)]
    affine = batchnorm_affine(graph.value(mean), graph.value(var), eps, *values)
    source = node.args[0]
    return NormCall(result, source, node, 1, affine, path_of(node), _type(node))  # type: ignore[arg-type]


def _arithmetic(graph: FoldGraph, node: fx.Node) -> NormCall | None:
    """Recognise `source * scale + shift` with the sum at `node`."""
    outer = _with_constant(graph, node, {"add", "sub"})
    if outer is None or len(outer[0].users) != 1:
        return None
    product, shift = outer
    inner = _with_constant(graph, product, {"mul"})
    if inner is None:
        return None
    source, scale = inner
    rank = len(graph.shape(node))
    axes = {_axis(values, rank) for values in (scale, shift)}
    if len(axes) != 1 or None in axes or graph.shape(source) != graph.shape(node):
        return None
    axis: int = axes.pop()  # type: ignore[assignment]
    sign = -1.0 if operation(node) == "sub" else 1.0
    affine = Affine(scale.flatten(), sign * shift.flatten())
    return NormCall(
        node, source, product, axis, affine, path_of(node), _type(node), arithmetic=True
    )


def _with_constant(
    graph: FoldGraph, node: fx.Node, names: set[str]
) -> tuple[fx.Node, Tensor] | None:
    """Return the varying and the constant operand of a sum or product of two tensors."""
    if node.op != "call_function" or operation(node) not in names or not is_tensor(node):
        return None
    nodes = node.all_input_nodes
    if len(nodes) != 2 or node.kwargs:
        return None
    first, second = nodes
    if graph.is_constant(first) and operation(node) != "sub":
        first, second = second, first
    if graph.is_constant(first) or not graph.is_constant(second):
        return None
    values = graph.value(second)
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        return None
    return first, values


def _axis(values: Tensor, rank: int) -> int | None:
    """Return the only dimension along which a broadcast operand is longer than 1."""
    shape = (1,) * (rank - values.ndim) + tuple(values.shape)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if not axes and values.ndim == rank and rank > 1:
        return 1  # a single channel
    return axes[0] if len(axes) == 1 else None
