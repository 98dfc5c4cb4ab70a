"""What is being moved through a graph, and the exception that stops it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bnconvert.fold.algebra import Affine
from bnconvert.fold.graph import operation, store
from bnconvert.fold.inplace import WAS_INPLACE
from bnconvert.fold.norms import path_of

if TYPE_CHECKING:
    from torch import Tensor, fx


class BlockedError(Exception):
    """A fold is not possible; the text is the reason, as a sentence."""


@dataclass(frozen=True)
class Motion:
    """A per-channel map on its way through a graph.

    Attributes:
        affine: The map.
        numbers: Which channel lies where in the tensor it has come to.
    """

    affine: Affine
    numbers: Tensor

    @property
    def touched(self) -> Affine:
        """The map at every place of the tensor where it is not the identity by position."""
        channels = self.numbers.flatten()
        return self.affine.take(channels[channels >= 0])

    @property
    def shifts(self) -> bool:
        """Whether the map has a shift."""
        return bool(self.touched.shift.any())

    @property
    def flips(self) -> bool:
        """Whether a scale is negative."""
        return bool((self.touched.scale < 0).any())

    def at(self, numbers: Tensor) -> Motion:
        """Return the same map at another tensor."""
        return Motion(self.affine, numbers)

    def first_negative(self) -> str:
        """Return a phrase for the first channel with a negative scale."""
        negative = ((self.affine.scale < 0).nonzero()).flatten()
        channel = int(negative[0]) if len(negative) else 0
        return f"its scale is negative in channel {channel} ({self.affine.scale[channel]:.3g})"

    def without_shift(self) -> Motion:
        """Return the same map without its shift."""
        return Motion(self.affine.scale_only, self.numbers)

    def without_scale(self) -> Motion:
        """Return the map that adds `shift / scale`, which applied first leaves only the scale.

        Scales of 0 must have been excluded.
        """
        shift = self.affine.shift / self.affine.scale
        return Motion(Affine(torch.ones_like(shift), shift), self.numbers)


def describe(node: fx.Node) -> str:
    """Return what a node is, for reasons: "layer1.0.conv2 (conv2d)"."""
    if node.op == "output":
        return "the model's output"
    if node.op == "placeholder":
        return f"the model's input {node.name}"
    if node.target is store:
        return f"the attribute {node.args[1]}, where the forward stores it"
    path = path_of(node)
    name = operation(node) + ("_" if WAS_INPLACE in node.meta else "")
    return f"{path} ({name})" if path else name
