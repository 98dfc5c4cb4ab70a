"""Follow the channels of a value through ONNX operators that only move data.

A `Track` says along which axis of a value the channels lie, and which channel each index of that
axis belongs to. Reshape and Flatten may merge the channel axis with its neighbours, after which
one channel owns several indices; whatever leaves no single axis is an error that says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each value by name, as it was in one run of the graph."""

MOVERS = frozenset(
    {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Dropout"}
)
"""Operators that a track can be followed through, from their first input to their output."""


class BlockedError(Exception):
    """Why a norm cannot go where it was tried; the text is the reason."""


@dataclass(frozen=True)
class Track:
    """Where the channels of a value lie.

    Attributes:
        axis: The axis along which they lie.
        channels: int64, one per index of that axis: the channel that it belongs to.
    """

    axis: int
    channels: np.ndarray


def follow(node: ir.Node, track: Track, shapes: Shapes, *, backward: bool) -> Track:
    """Return the track on the other side of a mover.

    Args:
        node: A node whose operator is in `MOVERS`.
        track: On its output when going backward, else on its first input.
        shapes: Shapes of the graph's values.
        backward: From output to input.

    Raises:
        BlockedError: No single axis holds the channels any more.
    """
    if node.op_type in {"Identity", "Dropout"}:
        return track
    given, result = (shape_of(value, shapes) for value in (node.inputs[0], node.outputs[0]))
    if node.op_type == "Transpose":
        return _transposed(node, track, len(given), backward)
    return (
        _reshaped(node, track, result, given) if backward else _reshaped(node, track, given, result)
    )


def shape_of(value: ir.Value | None, shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of a value.

    Raises:
        BlockedError: It was not seen in the run, as for values inside branches.
    """
    name = value.name if value is not None else None
    if name is None or name not in shapes:
        raise BlockedError(f"the shape of {name or 'an input'} is not known")
    return shapes[name]


def _transposed(node: ir.Node, track: Track, rank: int, backward: bool) -> Track:
    given = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    perm = list(given) if given is not None else list(reversed(range(rank)))
    axis = perm[track.axis] if backward else perm.index(track.axis)
    return Track(axis, track.channels)


def _reshaped(
    node: ir.Node, track: Track, before: tuple[int, ...], after: tuple[int, ...]
) -> Track:
    outer, length = math.prod(before[: track.axis]), before[track.axis]
    for axis, size in enumerate(after):
        start = math.prod(after[:axis])
        if size % length or outer % start:
            continue
        tiles = outer // start
        if size % (tiles * length) == 0:
            repeats = size // (tiles * length)
            return Track(axis, np.tile(np.repeat(track.channels, repeats), tiles))
    raise BlockedError(f"{label(node)} spreads its channels over several axes")


def label(node: ir.Node) -> str:
    """Return how a node is called in a report."""
    return f"{node.op_type} {node.name}" if node.name else node.op_type
