"""Follow the channels of a value through ONNX operators that move or combine data.

Where each channel lies is a channel map, as in `bnconvert.fold.channels`: the channel's number at
each place, -1 where there is none, of size 1 along every axis where it does not change.

Averages and interpolations let every map `scale * x + shift` per channel pass, as their weights
add up to one, unless zeros of the padding take part; maxima let those pass whose scale is not
negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bnconvert.export.onnx_constants import constant_array
from bnconvert.fold.channels import shrink

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from bnconvert.fold.algebra import Affine

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each value by name, as it was in one run of the graph."""

UNSHIFTED = "_unshifted"
"""End of the name of a result to which folding adds a shift; it has the shape of the sum."""

_MAXIMA = frozenset({"MaxPool", "GlobalMaxPool"})
_POOLS = frozenset({"AveragePool", "GlobalAveragePool"}) | _MAXIMA
_RESIZES = frozenset({"Resize", "Upsample"})
_WINDOWS = _POOLS | _RESIZES | {"Pad"}
_IN_PLACE = frozenset({"Identity", "Dropout", "Cast"}) | _WINDOWS

_BLOCKS = frozenset({"DepthToSpace", "SpaceToDepth"})
_SHAPERS = frozenset({"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "ReduceMean"})

MOVERS = _IN_PLACE | _SHAPERS | _BLOCKS
"""Operators that channels can be followed through, from their first input to their output."""


class BlockedError(Exception):
    """Why a norm cannot go where it was tried; the text is the reason."""


def follow(node: ir.Node, numbers: Tensor, shapes: Shapes, *, backward: bool) -> Tensor:
    """Return the channel map on the other side of a mover.

    Args:
        node: A node whose operator is in `MOVERS`.
        numbers: The map of its output when going backward, else of its first input.
        shapes: Shapes of the graph's values.
        backward: From output to input.

    Raises:
        BlockedError: The operator mixes channels.
    """
    given, result = (shape_of(value, shapes) for value in (node.inputs[0], node.outputs[0]))
    spread = [axis for axis, size in enumerate(numbers.shape) if size > 1]
    if node.op_type in _POOLS and any(axis > 1 for axis in spread):
        raise BlockedError(f"{label(node)} pools over its channels")
    if node.op_type in _RESIZES | {"Pad"}:
        for axis in spread:
            if given[axis] != result[axis] or _pads_axis(node, axis, shapes):
                raise BlockedError(f"{label(node)} changes the channels")
    if node.op_type in _IN_PLACE:
        return numbers
    if node.op_type == "Transpose":
        return _transposed(node, numbers, backward)
    if node.op_type == "ReduceMean":
        return _averaged(node, numbers, len(given), backward)
    before, after = (result, given) if backward else (given, result)
    numbers = numbers.expand(before)
    if node.op_type in _BLOCKS:
        split, perm = _block_moves(node, given)
        if backward:
            numbers = numbers.reshape([split[axis] for axis in perm])
            numbers = numbers.permute([perm.index(axis) for axis in range(len(perm))])
        else:
            numbers = numbers.reshape(split).permute(perm)
    return shrink(numbers.reshape(after))


def check_passage(node: ir.Node, affine: Affine) -> None:
    """Check that a map and a mover may change places.

    Raises:
        BlockedError: They may not; the text has the deciding value.
    """
    lowest = affine.scale.min().item()
    if node.op_type in _MAXIMA and lowest < 0:
        raise BlockedError(f"{label(node)} takes a maximum and a scale is negative ({lowest:.3g})")
    if node.op_type in _MAXIMA and len(node.outputs) > 1:
        raise BlockedError(f"{label(node)} also gives indices")
    if node.op_type == "Cast" and not _keeps_type(node):
        raise BlockedError(f"{label(node)} changes the type")
    if node.op_type == "Pad":
        _check_pad(node, affine)
    if node.op_type == "Resize" and _text(node, "coordinate_transformation_mode", "") in _CROPS:
        raise BlockedError(f"{label(node)} fills in a constant outside its input")
    if node.op_type == "Resize" and _text(node, "mode", "") == "cubic" and affine.shift.any():
        raise BlockedError(f"{label(node)} has weights that in onnxruntime do not add up to 1")
    if node.op_type == "AveragePool" and _averages_zeros(node) and bool(affine.shift.any()):
        raise BlockedError(f"{label(node)} averages zeros of its padding")


_CROPS = {"tf_crop_and_resize"}


def _keeps_type(node: ir.Node) -> bool:
    source, result = node.inputs[0], node.outputs[0]
    return source is not None and source.dtype is not None and source.dtype == result.dtype


def _pads_axis(node: ir.Node, axis: int, shapes: Shapes) -> bool:
    """Whether a Pad adds or removes something along an axis, or may."""
    if node.op_type != "Pad":
        return False
    rank = len(shape_of(node.inputs[0], shapes))
    edges = _pads(node)
    if edges is None:
        return True
    axes = (
        list(range(rank)) if len(node.inputs) < 4 or node.inputs[3] is None else _numbers(node, 3)
    )
    if axes is None or len(edges) != 2 * len(axes):
        return True
    places = [place for place, each in enumerate(axes) if each % rank == axis]
    return any(edges[place] or edges[place + len(axes)] for place in places)


def _pads(node: ir.Node) -> list[int] | None:
    if "pads" in node.attributes:
        return list(node.attributes["pads"].as_ints())
    return _numbers(node, 1)


def _numbers(node: ir.Node, place: int) -> list[int] | None:
    """Return the whole numbers of a constant input."""
    known = constant_array(node.inputs[place]) if len(node.inputs) > place else None
    return None if known is None else [int(number) for number in known.flatten()]


def _check_pad(node: ir.Node, affine: Affine) -> None:
    """Copies of values at the edge are mapped with them; constants are not."""
    edges = _pads(node)
    crops = edges is not None and all(edge <= 0 for edge in edges)
    if crops or _text(node, "mode", "constant") != "constant":
        return
    given = node.inputs[2] if len(node.inputs) > 2 else None
    value = node.attributes["value"].as_float() if "value" in node.attributes else 0.0
    if given is not None:
        known = constant_array(given)
        value = math.nan if known is None else float(known.item())
    if value != 0 or bool(affine.shift.any()):
        raise BlockedError(f"{label(node)} pads with a constant, which the map would change")


def _text(node: ir.Node, name: str, default: str) -> str:
    return node.attributes[name].as_string() if name in node.attributes else default


def _averages_zeros(node: ir.Node) -> bool:
    attributes = node.attributes
    includes = "count_include_pad" in attributes and attributes["count_include_pad"].as_int()
    ceil = "ceil_mode" in attributes and attributes["ceil_mode"].as_int()
    return bool(includes and (ceil or is_padded(node)))


def is_padded(node: ir.Node, kernel: Sequence[int] = ()) -> bool:
    """Whether a convolution or pool adds values around its input.

    Args:
        node: The node.
        kernel: Sizes of its kernel where it does not state them.
    """
    kernel = (
        node.attributes["kernel_shape"].as_ints() if "kernel_shape" in node.attributes else kernel
    )
    padding = _text(node, "auto_pad", "NOTSET")
    pads = node.attributes["pads"].as_ints() if "pads" in node.attributes else ()
    if padding == "NOTSET":
        return any(pads)
    single = bool(kernel) and all(size == 1 for size in kernel)  # SAME then adds nothing
    return padding != "VALID" and not single


def shape_of(value: ir.Value | None, shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of a value.

    Raises:
        BlockedError: It was not seen in the run, as for values inside branches.
    """
    name = value.name if value is not None else None
    while name is not None and name not in shapes and name.endswith(UNSHIFTED):
        name = name.removesuffix(UNSHIFTED)
    if name is None or name not in shapes:
        raise BlockedError(f"the shape of {name or 'an input'} is not known")
    return shapes[name]


def _transposed(node: ir.Node, numbers: Tensor, backward: bool) -> Tensor:
    given = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    perm = list(given) if given is not None else list(reversed(range(numbers.ndim)))
    return numbers.permute([perm.index(axis) for axis in range(len(perm))] if backward else perm)


def _block_moves(node: ir.Node, given: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return how a node between channels and blocks of pixels splits its axes and orders them."""
    batch, channels, height, width = given
    size = node.attributes["blocksize"].as_int()
    if node.op_type == "SpaceToDepth":
        split = [batch, channels, height // size, size, width // size, size]
        return split, [0, 3, 5, 1, 2, 4]
    left = channels // size**2
    if _text(node, "mode", "DCR") == "DCR":
        return [batch, size, size, left, height, width], [0, 3, 4, 1, 5, 2]
    return [batch, left, size, size, height, width], [0, 1, 4, 2, 5, 3]


def _averaged(node: ir.Node, numbers: Tensor, rank: int, backward: bool) -> Tensor:
    axes = _reduced_axes(node)
    if not axes:
        raise BlockedError(f"{label(node)} averages over axes that are not known, or all")
    reduced = sorted({axis % rank for axis in axes})
    keeps = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
    if not keeps and backward:
        for axis in reduced:
            numbers = numbers.unsqueeze(axis)
        return numbers
    if any(numbers.shape[axis] > 1 for axis in reduced):
        raise BlockedError(f"{label(node)} averages over its channels")
    return numbers if keeps else numbers.squeeze(reduced)


def _reduced_axes(node: ir.Node) -> list[int]:
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    return _numbers(node, 1) or []


def label(node: ir.Node) -> str:
    """Return how a node is called in a report."""
    return f"{node.op_type} {node.name}" if node.name else node.op_type
