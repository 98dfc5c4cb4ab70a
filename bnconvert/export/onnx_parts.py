"""Follow the channels of a value through ONNX operators that join values, and pick parts of them.

Concat; Split, Slice and Gather by constants. Places that hold no channel of the norm are -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bnconvert.export.onnx_constants import constant_array
from bnconvert.export.onnx_paths import BlockedError, Shapes, label, shape_of
from bnconvert.fold.channels import UNTOUCHED, shrink

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

PARTS = frozenset({"Split", "Slice", "Gather"})
"""Operators of whose first input each output is a part."""

_CHANNEL_AXIS = 1


def through_concat(node: ir.Node, index: int, numbers: Tensor, shapes: Shapes) -> Tensor:
    """Return the channel map of the output of a Concat from that of one input.

    Raises:
        BlockedError: It joins along another axis than that of the channels.
    """
    axis = _joined(node, shapes)
    if not _is_axis_of(numbers, axis):
        raise BlockedError(f"{label(node)} joins along another axis than that of its channels")
    sizes = [shape_of(value, shapes)[axis] for value in node.inputs]
    pieces = [_untouched(numbers, axis, size) for size in sizes]
    pieces[index] = _expanded(numbers, axis, sizes[index])
    return shrink(torch.cat(pieces, axis))


def before_concat(node: ir.Node, index: int, numbers: Tensor, shapes: Shapes) -> Tensor:
    """Return the channel map of one input of a Concat from that of its output."""
    axis = _joined(node, shapes)
    if numbers.shape[axis] == 1:
        return numbers
    sizes = [shape_of(value, shapes)[axis] for value in node.inputs]
    return numbers.narrow(axis, sum(sizes[:index]), sizes[index])


def part_of(node: ir.Node, number: int, numbers: Tensor, shapes: Shapes) -> Tensor:
    """Return the channel map of an output from that of the first input.

    Args:
        node: A node whose operator is in `PARTS`.
        number: Which output.
        numbers: The map of the first input.
        shapes: Shapes of the graph's values.

    Raises:
        BlockedError: Which part it is is not known.
    """
    for axis in range(numbers.ndim):
        places = torch.from_numpy(_places(node, number, axis, shapes).copy())
        if numbers.shape[axis] > 1:
            numbers = numbers.index_select(axis, places)
    return shrink(numbers)


def whole_of(node: ir.Node, number: int, numbers: Tensor, shapes: Shapes) -> Tensor:
    """Return the channel map of the first input from that of an output; arguments as `part_of`."""
    if (
        node.op_type == "Split"
        and len(node.outputs) > 1
        and not _is_axis_of(numbers, _axis(node, shapes))
    ):
        raise BlockedError(f"{label(node)} splits along another axis than that of its channels")
    given = shape_of(node.inputs[0], shapes)
    for axis in range(numbers.ndim):
        places = torch.from_numpy(_places(node, number, axis, shapes).copy())
        if not _is_axis_of(numbers, axis):
            continue
        part = _expanded(numbers, axis, len(places))
        numbers = _untouched(numbers, axis, given[axis]).index_copy(axis, places, part)
        if not torch.equal(numbers.index_select(axis, places), part):
            raise BlockedError(f"{label(node)} uses one channel as several")
    return shrink(numbers)


def _is_axis_of(numbers: Tensor, axis: int) -> bool:
    """Whether channels lie along an axis; a single one lies along the usual axis."""
    return numbers.shape[axis] > 1 or (numbers.numel() == 1 and axis == _CHANNEL_AXIS)


def _expanded(numbers: Tensor, axis: int, size: int) -> Tensor:
    return numbers.expand([size if at == axis else n for at, n in enumerate(numbers.shape)])


def _untouched(numbers: Tensor, axis: int, size: int) -> Tensor:
    shape = [size if at == axis else n for at, n in enumerate(numbers.shape)]
    return numbers.new_full(shape, UNTOUCHED)


def _joined(node: ir.Node, shapes: Shapes) -> int:
    return node.attributes["axis"].as_int() % len(shape_of(node.outputs[0], shapes))


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
    indices = constant_array(node.inputs[1])
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
    found = constant_array(node.inputs[place])
    if found is None:
        raise BlockedError(f"{label(node)} slices at places that are not known")
    return [int(number) for number in found.flatten()]


def _axis(node: ir.Node, shapes: Shapes) -> int:
    given = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return given % len(shape_of(node.inputs[0], shapes))
