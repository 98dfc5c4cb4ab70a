"""Operations that a per-channel map passes unchanged, and under which conditions.

A rule is a function decorated with the names of its operations. It gets the graph, the operation
and the motion, and returns the `Passage`, or raises `BlockedError` with the reason. To let folding
pass another operation, write its rule here, a test and a row in `docs/folding.md`. Operations that
change a map on its way are in `bnconvert.fold.constants`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.fold.graph import FoldGraph, operation
from bnconvert.fold.motion import BlockedError, Motion, describe

if TYPE_CHECKING:
    from torch import Tensor, fx


@dataclass(frozen=True)
class MovesData:
    """The operation copies elements; the channel map is found by running it on the map."""


@dataclass(frozen=True)
class Mixes:
    """The operation combines elements along some dimensions with weights that sum to 1.

    Of several results the first holds them, and the others, such as indices, stay as they are.

    Attributes:
        dims: The dimensions, of the input.
        drops: Whether the result lacks them.
    """

    dims: tuple[int, ...]
    drops: bool = False


Passage = MovesData | Mixes
Rule = Callable[[FoldGraph, "fx.Node", Motion], Passage]

RULES: dict[str, Rule] = {}
"""Operation name -> its rule."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def passage(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    """Return how a motion passes an operation.

    Raises:
        BlockedError: It does not pass.
    """
    found = RULES.get(operation(node))
    if found is None:
        raise BlockedError(f"{describe(node)} does not let a per-channel map through")
    return found(graph, node, motion)


@rule(
    "alias",
    "cat",
    "channel_shuffle",
    "chunk",
    "clone",
    "concat",
    "contiguous",
    "detach",
    "expand",
    "expand_as",
    "flatten",
    "flip",
    "getitem",
    "index",
    "index_select",
    "lift_fresh_copy",
    "mT",
    "matrix_H",
    "movedim",
    "narrow",
    "native_channel_shuffle",
    "numpy_T",
    "permute",
    "permute_copy",
    "pixel_shuffle",
    "pixel_unshuffle",
    "repeat",
    "repeat_interleave",
    "reshape",
    "reshape_as",
    "roll",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "stack",
    "swapaxes",
    "t",
    "tensor_split",
    "tile",
    "transpose",
    "unbind",
    "unflatten",
    "unsafe_chunk",
    "unsafe_split",
    "unsqueeze",
    "view",
    "view_as",
    "_unsafe_view",
)
def _moves_data(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    if node.target is torch.ops.aten.view.dtype:
        raise BlockedError(f"{describe(node)} reads the bytes as another dtype")
    return MovesData()


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")
def _dropout(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    if len(node.args) > 2 and node.args[2] and node.args[1]:
        raise BlockedError(f"{describe(node)} drops values at random")
    return Mixes(())


@rule("to", "_to_copy", "type_as")
def _cast(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    source = node.args[0]
    if source.meta["val"].dtype != node.meta["val"].dtype:  # type: ignore[union-attr]
        raise BlockedError(f"{describe(node)} changes the dtype")
    return Mixes(())


@rule("pad", "constant_pad_nd")
def _pad(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    constant = operation(node) == "constant_pad_nd" or _argument(node, 2, "mode") in {
        None,
        "constant",
    }
    if not constant:
        return MovesData()
    edges: Any = node.args[1]
    crops = all(isinstance(edge, int) and edge <= 0 for edge in edges)
    value = _argument(node, 2 if operation(node) == "constant_pad_nd" else 3, "value") or 0.0
    if not crops and (value != 0 or motion.shifts):
        raise BlockedError(f"{describe(node)} pads with the constant {value:g}, which is not moved")
    padded = len(graph.concrete(node.args[1])) // 2
    return Mixes(_last(graph, node, padded))


@rule(
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
)
def _copying_pad(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    return MovesData()


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _average(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    padding = graph.concrete(_argument(node, 3, "padding")) or 0
    counted = _argument(node, 5, "count_include_pad")
    pads = any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
    if motion.shifts and pads and counted is not False:
        raise BlockedError(f"{describe(node)} counts its zero padding in the average")
    if motion.shifts and _argument(node, 6, "divisor_override") is not None:
        raise BlockedError(f"{describe(node)} divides by a number of its own")
    return Mixes(_last(graph, node, int(operation(node)[-2])))


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_average(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    return Mixes(_last(graph, node, int(operation(node)[-2])))


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices")
@rule("max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d")
@rule("adaptive_max_pool3d")
def _maximum(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    _refuse_flips(node, motion)
    rank = int(operation(node).partition("pool")[2][0])
    return Mixes(_last(graph, node, rank))


@rule("amax", "max")
def _amax(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    _refuse_flips(node, motion)
    if node.target is torch.ops.aten.max.other:
        raise BlockedError(f"{describe(node)} does not let a per-channel map through")
    return _reduced(graph, node)


def _refuse_flips(node: fx.Node, motion: Motion) -> None:
    if motion.flips:
        raise BlockedError(f"{motion.first_negative()}, and {describe(node)} takes the maximum")
    parts = [user for user in node.users if operation(user) == "getitem" and user.users]
    if any(part.args[1] != 0 for part in parts) and not bool(motion.touched.scale.all()):
        raise BlockedError(f"a scale is 0, and {describe(node)} also gives the maximum's place")


@rule("mean")
def _mean(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    return _reduced(graph, node)


@rule(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
def _upsample(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    return Mixes(_last(graph, node, len(graph.shape(node)) - 2))


@rule("leaky_relu", "prelu", "relu")
def _homogeneous(graph: FoldGraph, node: fx.Node, motion: Motion) -> Passage:
    if motion.flips:
        raise BlockedError(f"{motion.first_negative()}, and {describe(node)} depends on the sign")
    if motion.shifts:
        raise BlockedError(f"{describe(node)} does not let a shift through")
    return Mixes(())


def pass_through(node: fx.Node, mixes: Mixes, numbers: Tensor) -> Tensor:
    """Return the channel map of the result of a mixing operation from that of its input.

    Raises:
        BlockedError: Channels lie along a dimension that is mixed.
    """
    for dim in mixes.dims:
        if numbers.shape[dim] != 1:
            raise BlockedError(f"{describe(node)} mixes channels")
    if mixes.drops:
        kept = [size for dim, size in enumerate(numbers.shape) if dim not in mixes.dims]
        return numbers.reshape(kept)
    return numbers


def pass_back(node: fx.Node, mixes: Mixes, numbers: Tensor) -> Tensor:
    """Return the channel map of the input of a mixing operation from that of its result.

    Raises:
        BlockedError: Channels lie along a dimension that is mixed.
    """
    if mixes.drops:
        for dim in sorted(mixes.dims):
            numbers = numbers.unsqueeze(dim)
        return numbers
    return pass_through(node, mixes, numbers)


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _last(graph: FoldGraph, node: fx.Node, count: int) -> tuple[int, ...]:
    source = node.args[0]
    rank = len(graph.shape(source))  # type: ignore[arg-type]
    return tuple(range(rank - count, rank))


def _reduced(graph: FoldGraph, node: fx.Node) -> Passage:
    rank = len(graph.shape(node.args[0]))  # type: ignore[arg-type]
    dims = _argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    keeps = bool(_argument(node, 2, "keepdim"))
    return Mixes(tuple(dim % rank for dim in dims), drops=not keeps)
