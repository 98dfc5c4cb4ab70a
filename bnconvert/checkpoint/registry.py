"""What a format is, and what several formats do alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.layouts import choose
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bnconvert.checkpoint.probe import Probe
    from bnconvert.checkpoint.record import Weights


@dataclass(frozen=True)
class Options:
    """What a reader is asked for.

    Attributes:
        weights: "auto", "raw" or "ema".
        allow: Names of classes admitted as inert stand-ins.
        read: Reads another path with the same options; for folders and indexes.
    """

    weights: str
    allow: tuple[str, ...]
    read: Callable[[Path], Weights]


@dataclass(frozen=True)
class Format:
    """One container of weights.

    Attributes:
        name: As shown to the user.
        matches: Whether a path is of this format, from its bytes.
        read: Returns the weights in it.
    """

    name: str
    matches: Callable[[Probe], bool]
    read: Callable[[Probe, Options], Weights]


def from_tree(tree: Any, options: Options, format_name: str = "") -> Weights:
    """Return the weights that a layout finds in an object."""
    weights = choose(tree, options.weights)
    weights.format = format_name
    return weights


def only_raw(weights: Weights, options: Options) -> Weights:
    """Refuse "ema" for formats that hold one set of weights."""
    if options.weights == "ema":
        raise CheckpointError("holds one set of weights and no EMA; ask for raw or auto")
    return weights
