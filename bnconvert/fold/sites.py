"""Linear operations of a graph, which per-channel affine maps are folded into.

A site keeps what was folded into it as vectors, one value per channel; its weight is computed once,
in float64, when all folds are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bnconvert.fold.algebra import Affine, Layout
from bnconvert.fold.graph import is_tensor, operation

if TYPE_CHECKING:
    from torch import Tensor, fx

    from bnconvert.fold.graph import FoldGraph

_CONV_RANK = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_TRANSPOSED_RANK = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


class Site:
    """A convolution, Linear or matrix product with a constant weight.

    Attributes:
        node: The operation.
        source: Its input.
        weight: The node of its weight.
        bias: The node of its bias, or None.
        layout: How channels lie in the weight.
        output_axis: Dimension of the output that holds its channels.
        input_axis: Dimension of the input that holds its channels.
        rank: Number of spatial dimensions.
        pads_zeros: Whether some output reads padding zeros, or only part of the kernel.
    """

    def __init__(
        self,
        graph: FoldGraph,
        node: fx.Node,
        source: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None,
        layout: Layout,
        rank: int = 0,
        pads_zeros: bool = False,
    ) -> None:
        self.node = node
        self.source = source
        self.weight = weight
        self.bias = bias
        self.layout = layout
        self.pads_zeros = pads_zeros
        self.rank = rank
        self.output_axis = len(graph.shape(node)) - 1 - rank
        self.input_axis = len(graph.shape(source)) - 1 - rank
        self._graph = graph
        self._out_scale: Tensor | None = None
        self._in_scale: Tensor | None = None
        self._bias = graph.value(bias) if bias is not None else None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the operation by name, defaults included."""
        return _arguments(self.node)

    @property
    def channels(self) -> tuple[int, int]:
        """The number of output and of input channels."""
        return self.layout.channels(self._graph.value(self.weight))

    @property
    def why_no_shift(self) -> str:
        """Why a shift of the input cannot be moved into the bias, where `pads_zeros` says so."""
        if self.layout.transposed:
            return "spreads its input, so that its outputs see different parts of the kernel"
        return "pads its input with zeros"

    @property
    def quantised(self) -> bool:
        """Whether the weight is computed from stored whole numbers."""
        pending, seen = [self.weight], set()
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending += node.all_input_nodes
        dtypes = [n.meta["val"].dtype for n in seen if n.op == "placeholder"]
        return any(not dtype.is_floating_point and dtype != torch.bool for dtype in dtypes)

    @property
    def changed(self) -> bool:
        """Whether anything was folded into the site."""
        return self._out_scale is not None or self._in_scale is not None

    @property
    def has_shift(self) -> bool:
        """Whether the site needs a bias."""
        return self._bias is not None

    def absorb_after(self, affine: Affine) -> None:
        """Fold in a map of the output channels."""
        old = self._out_scale
        self._out_scale = affine.scale if old is None else affine.scale * old
        if self._bias is None and not affine.shift.any():
            return
        bias = torch.zeros_like(affine.shift) if self._bias is None else self._bias
        self._bias = affine.scale * bias + affine.shift

    def absorb_before(self, affine: Affine) -> None:
        """Fold in a map of the input channels."""
        if affine.shift.any():
            moved = self.layout.through(affine.shift, self.new_weight())
            self._bias = moved if self._bias is None else self._bias + moved
        old = self._in_scale
        self._in_scale = affine.scale if old is None else affine.scale * old

    def new_weight(self) -> Tensor:
        """Return the weight with everything folded in, in float64."""
        weight: Tensor = self._graph.value(self.weight)
        if self._out_scale is not None:
            weight = weight * self.layout.per_output(self._out_scale, weight)
        if self._in_scale is not None:
            weight = weight * self.layout.per_input(self._in_scale, weight)
        return weight

    def new_bias(self) -> Tensor | None:
        """Return the bias with everything folded in, in float64; None where there is none."""
        return self._bias


def find_site(graph: FoldGraph, node: fx.Node) -> Site | None:
    """Return the site at a node, or None where the node is no linear operation with weights."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    name = operation(node)
    if name in _CONV_RANK:
        return _conv(graph, node, _CONV_RANK[name])
    if name in _TRANSPOSED_RANK:
        return _transposed(graph, node, _TRANSPOSED_RANK[name])
    reader = {"convolution": _convolution, "linear": _linear, "addmm": _addmm}.get(name)
    if reader is None and name in {"mm", "matmul"}:
        reader = _matmul
    return reader(graph, node) if reader else None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)  # noqa: S101 (named like an operation)
    schema = node.target._schema.arguments
    values = {argument.name: argument.default_value for argument in schema}
    values.update(zip((argument.name for argument in schema), node.args, strict=False))
    values.update(node.kwargs)
    return values


def _has_weights(graph: FoldGraph, weight: Any, bias: Any, source: Any) -> bool:
    if graph.is_constant(source) or not graph.is_constant(weight):
        return False
    return (bias is None or graph.is_constant(bias)) and graph.value(weight).is_floating_point()


def _conv(graph: FoldGraph, node: fx.Node, rank: int) -> Site | None:
    given = _arguments(node)
    source, weight, bias = given["input"], given["weight"], given["bias"]
    if not _has_weights(graph, weight, bias, source):
        return None
    padding = given["padding"]
    if isinstance(padding, str):
        kernel = graph.shape(weight)[2:]
        pads = padding == "same" and any(size > 1 for size in kernel)
    else:
        pads = any(padding)
    layout = Layout(groups=given["groups"])
    return Site(graph, node, source, weight, bias, layout, rank, pads)


def _transposed(graph: FoldGraph, node: fx.Node, rank: int) -> Site | None:
    given = _arguments(node)
    source, weight, bias = given["input"], given["weight"], given["bias"]
    if not _has_weights(graph, weight, bias, source):
        return None
    layout = Layout(transposed=True, groups=given["groups"])
    return Site(graph, node, source, weight, bias, layout, rank, _spreads(graph, weight, given))


def _spreads(graph: FoldGraph, weight: fx.Node, given: dict[str, Any]) -> bool:
    """Whether some output of a transposed convolution sees only part of the kernel."""
    larger = [*graph.shape(weight)[2:], *given["stride"]]
    return any(size > 1 for size in larger) or any([*given["padding"], *given["output_padding"]])


def _convolution(graph: FoldGraph, node: fx.Node) -> Site | None:
    given = _arguments(node)
    source, weight, bias = given["input"], given["weight"], given["bias"]
    if not _has_weights(graph, weight, bias, source):
        return None
    rank = len(graph.shape(weight)) - 2
    layout = Layout(transposed=given["transposed"], groups=given["groups"])
    pads = any(given["padding"])
    if given["transposed"]:
        pads = _spreads(graph, weight, given)
    return Site(graph, node, source, weight, bias, layout, rank, pads)


def _linear(graph: FoldGraph, node: fx.Node) -> Site | None:
    given = _arguments(node)
    source, weight, bias = given["input"], given["weight"], given["bias"]
    if not _has_weights(graph, weight, bias, source) or len(graph.shape(weight)) != 2:
        return None
    return Site(graph, node, source, weight, bias, Layout())


def _addmm(graph: FoldGraph, node: fx.Node) -> Site | None:
    given = _arguments(node)
    source, weight, bias = given["mat1"], given["mat2"], given["self"]
    plain = given["alpha"] == 1 and given["beta"] == 1
    if not plain or not _has_weights(graph, weight, bias, source) or len(graph.shape(bias)) != 1:
        return None
    return Site(graph, node, source, weight, bias, Layout(transposed=True))


def _matmul(graph: FoldGraph, node: fx.Node) -> Site | None:
    source, weight = node.args[0], node.args[1]
    if not _has_weights(graph, weight, None, source) or len(graph.shape(weight)) != 2:  # type: ignore[arg-type]
        return None
    return Site(graph, node, source, weight, None, Layout(transposed=True))  # type: ignore[arg-type]
