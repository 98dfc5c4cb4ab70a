"""Follow the channels of a value through ONNX operators that pick parts of it.

Split, Slice and Gather by constants; places that they leave out hold no channel of the norm, -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bnconvert.export.onnx_paths import BlockedError, Shapes, Track, label, shape_of

if TYPE_CHECKING:
    import onnx_ir as ir

PARTS = frozenset({"Split", "Slice", "Gather"})
"""Operators of whose first input each output is a part."""

_NONE = -1


def part_of(node: ir.Node, number: int, track: Track, shapes: Shapes) -> Track:
    """Return the track on an output of the one on the first input.

    Args:
        node: A node whose operator is in `PARTS`.
        number: Which output.
        track: On the first input.
        shapes: Shapes of the graph's values.

    Raises:
        BlockedError: The part is not known, or has no single axis of channels.
    """
    return Track(track.axis, track.channels[_places(node, number, track.axis, shapes)])


def whole_of(node: ir.Node, number: int, track: Track, shapes: Shapes) -> Track:
    """Return the track on the first input of the one on an output; arguments as `part_of`."""
    places = _places(node, number, track.axis, shapes)
    channels = np.full(shape_of(node.inputs[0], shapes)[track.axis], _NONE, dtype=np.int64)
    channels[places] = track.channels
    if not np.array_equal(channels[places], track.channels):
        raise BlockedError(f"{label(node)} uses one channel as several")
    if node.op_type == "Split" and _axis(node, shapes) != track.axis and len(node.outputs) > 1:
        raise BlockedError(f"{label(node)} splits along another axis than that of its channels")
    return Track(track.axis, channels)


def _places(node: ir.Node, number: int, axis: int, shapes: Shapes) -> np.ndarray:
    """Return the indices along an axis of the first input that an output takes."""
    every = np.arange(shape_of(node.inputs[0], shapes)[axis])
    if node.op_type == "Slice":
        return _sliced(node, every, axis, shapes)
    if _axis(node, shapes) != axis:
        return every
    if node.op_type == "Split":
        sizes = [shape_of(value, shapes)[axis] for value in node.outputs]
        return np.split(every, np.cumsum(sizes)[:-1])[number]
    indices = _constant(node, 1)
    if indices is None or indices.ndim != 1:
        raise BlockedError(f"{label(node)} gathers by indices that are not known, or not in a row")
    places: np.ndarray = every[indices]
    return places


def _sliced(node: ir.Node, every: np.ndarray, axis: int, shapes: Shapes) -> np.ndarray:
    names = ("starts", "ends", "axes", "steps")
    values = [_argument(node, place, name) for place, name in enumerate(names, start=1)]
    starts, ends, axes, steps = values
    if starts is None or ends is None:
        raise BlockedError(f"{label(node)} slices at places that are not known")
    rank = len(shape_of(node.inputs[0], shapes))
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, where, step in zip(starts, ends, axes, steps, strict=True):
        if where % rank == axis:
            low = -len(every) - 1  # an end below every index, which Python takes as counted back
            return every[slice(start, None if end <= low else end, step)]
    return every


def _argument(node: ir.Node, place: int, name: str) -> list[int] | None:
    """Return whole numbers that are a constant input, or an attribute before opset 10."""
    if name in node.attributes:
        return list(node.attributes[name].as_ints())
    if len(node.inputs) <= place or node.inputs[place] is None:
        return None
    found = _constant(node, place)
    if found is None:
        raise BlockedError(f"{label(node)} slices at places that are not known")
    return [int(number) for number in found.flatten()]


def _constant(node: ir.Node, place: int) -> np.ndarray | None:
    value = node.inputs[place] if len(node.inputs) > place else None
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def _axis(node: ir.Node, shapes: Shapes) -> int:
    given = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return given % len(shape_of(node.inputs[0], shapes))
