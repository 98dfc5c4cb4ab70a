"""Where each channel of a norm lies in a tensor, followed through operations that move data.

A channel map is a float64 tensor of the rank of the tensor it describes. It holds the channel
number at each place, -1 at places that hold none, and has size 1 in every dimension along which
the number does not change; (1, C, 1, 1) is an ordinary image. Because it is a tensor, an operation
that only moves data is followed by running that very operation on the map: nothing has to know how
a reshape or a channel shuffle regroups its dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

if TYPE_CHECKING:
    from bnconvert.fold.graph import FoldGraph

UNTOUCHED = -1.0

_ON_ANY_STRIDES: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default,
}
"""The same for operations that refuse strides which maps have and the tensors do not."""


def channel_map(rank: int, axis: int, channels: int) -> Tensor:
    """Return the map of a tensor whose channels lie along one dimension."""
    shape = [1] * rank
    shape[axis] = channels
    return torch.arange(channels, dtype=torch.float64).reshape(shape)


def along(numbers: Tensor, axis: int, size: int) -> Tensor | None:
    """Return the map as a vector along one dimension, or None if another dimension matters too."""
    axis %= numbers.ndim
    if any(extent != 1 for dim, extent in enumerate(numbers.shape) if dim != axis):
        return None
    return numbers.flatten().expand(size)


def by_channel(values: Tensor, numbers: Tensor, channels: int) -> Tensor | None:
    """Return the value that a broadcast constant has in each channel, 1 where one is nowhere.

    Args:
        values: The constant, of at most the rank of the map.
        numbers: The channel map of the tensor it is broadcast against.
        channels: The number of channels.

    Returns:
        Shape (channels,), or None where the constant differs within a channel.
    """
    values, numbers = torch.broadcast_tensors(  # type: ignore[no-untyped-call]  # of torch
        shrink(values), numbers
    )
    touched = numbers != UNTOUCHED
    values, at = values[touched], numbers[touched].to(torch.int64)
    result = torch.ones(channels, dtype=values.dtype)
    result[at] = values
    return result if torch.equal(result[at], values) else None


def is_untouched(numbers: Tensor) -> bool:
    """Whether no place holds a channel."""
    return bool((numbers == UNTOUCHED).all())


def shrink(full: Tensor) -> Tensor:
    """Return the map with every dimension narrowed to 1 along which it does not change."""
    for dim in range(full.ndim):
        if full.shape[dim] > 1:
            first = full.narrow(dim, 0, 1)
            if full.stride(dim) == 0 or torch.equal(first.expand(full.shape), full):
                full = first
    return full


def move_forward(graph: FoldGraph, node: fx.Node, maps: dict[fx.Node, Tensor]) -> Any:
    """Return the map, or the tuple of maps, of what a data-moving operation returns.

    Args:
        graph: The graph that holds the node.
        node: The operation.
        maps: The maps of its inputs; inputs without one are untouched.
    """

    def expand(argument: fx.Node) -> Any:
        if argument not in maps and _is_index(graph, argument):
            return graph.value(argument)
        if not isinstance(argument.meta.get("val"), Tensor):
            return maps.get(argument, argument)
        numbers = maps.get(argument, torch.full((), UNTOUCHED, dtype=torch.float64))
        return numbers.expand(graph.shape(argument))

    result = _run(graph, node, expand)
    if isinstance(result, Tensor):
        return shrink(result)
    return tuple(shrink(part) for part in result)


def move_backward(
    graph: FoldGraph, node: fx.Node, wanted: dict[int, Tensor]
) -> dict[fx.Node, Tensor] | None:
    """Return the maps of the inputs of a data-moving operation from the map of its result.

    The operation is run on the positions of its inputs' elements, which shows what each element of
    the result is a copy of.

    Args:
        graph: The graph that holds the node.
        node: The operation.
        wanted: The maps of the results by their number, 0 for an operation with one.

    Returns:
        The maps by input, or None when one input element is read as two channels.
    """
    offsets: dict[fx.Node, int] = {}
    total = 0

    def positions(argument: fx.Node) -> Any:
        nonlocal total
        if _is_index(graph, argument):
            return graph.value(argument)
        if not isinstance(argument.meta.get("val"), Tensor):
            return argument
        shape = graph.shape(argument)
        count = torch.Size(shape).numel()
        if argument not in offsets:
            offsets[argument] = total
            total += count
        start = offsets[argument]
        return torch.arange(start, start + count, dtype=torch.float64).reshape(shape)

    result = _run(graph, node, positions)
    parts = {0: result} if isinstance(result, Tensor) else dict(enumerate(result))
    flat = torch.full((total,), UNTOUCHED, dtype=torch.float64)
    for number, channels in wanted.items():
        source = parts[number].flatten().to(torch.int64)
        flat[source] = channels.expand(parts[number].shape).flatten()
    for number, channels in wanted.items():
        source = parts[number].flatten().to(torch.int64)
        if not torch.equal(flat[source], channels.expand(parts[number].shape).flatten()):
            return None
    maps = {}
    for argument, start in offsets.items():
        shape = graph.shape(argument)
        maps[argument] = shrink(flat[start : start + torch.Size(shape).numel()].reshape(shape))
    return maps


def _is_index(graph: FoldGraph, node: fx.Node) -> bool:
    """Whether the node is a constant of whole numbers, which says where data goes."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_floating_point():
        return False
    return graph.is_constant(node)


def _run(graph: FoldGraph, node: fx.Node, replace: Any) -> Any:
    args = graph.concrete(map_arg(graph.concrete(node.args), replace))
    kwargs = graph.concrete(dict(map_arg(graph.concrete(node.kwargs), replace)))
    assert callable(node.target)  # noqa: S101 (a call_function node)
    return _ON_ANY_STRIDES.get(node.target, node.target)(*args, **kwargs)
