"""Products and sums with constants on the way of a map: `factor * x + term`, like a layer scale.

A map passes them, changed. With `a` and `b` for factor and term,

    forward:    a * (scale * x + shift) + b  =  scale * (a * x + b) + (a * shift + b - scale * b)
    backward:   scale * (a * x + b) + shift  =  a * (scale * x + (scale * b + shift - b) / a) + b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from bnconvert.fold.algebra import Affine
from bnconvert.fold.channels import by_channel
from bnconvert.fold.graph import operation
from bnconvert.fold.motion import BlockedError, Motion, describe

if TYPE_CHECKING:
    from bnconvert.fold.graph import FoldGraph

_OPERATIONS = {"add", "div", "mul", "neg", "rsub", "sub"}


@dataclass(frozen=True)
class ConstantMap:
    """An operation that computes `factor * x + term`.

    Attributes:
        node: The operation.
        source: The node of x.
        factor: float64, broadcast against x.
        term: Likewise.
    """

    node: fx.Node
    source: fx.Node
    factor: Tensor
    term: Tensor

    def pass_forward(self, motion: Motion) -> Motion:
        """Return the map of the result from that of x.

        Raises:
            BlockedError: The constants differ within a channel.
        """
        factor, term = self._by_channel(motion)
        affine = motion.affine
        shift = factor * affine.shift + term - affine.scale * term
        return Motion(Affine(affine.scale, shift), motion.numbers)

    def pass_back(self, motion: Motion) -> Motion:
        """Return the map of x from that of the result.

        Raises:
            BlockedError: The constants differ within a channel, or a factor of 0 hides x.
        """
        factor, term = self._by_channel(motion)
        affine = motion.affine
        shift = affine.scale * term + affine.shift - term
        hidden = (factor == 0) & (shift != 0)
        if hidden.any():
            channel = int(hidden.nonzero()[0])
            raise BlockedError(f"{describe(self.node)} multiplies channel {channel} by 0")
        shift = torch.where(shift == 0, 0.0, shift / factor)
        return Motion(Affine(affine.scale, shift), motion.numbers)

    def _by_channel(self, motion: Motion) -> tuple[Tensor, Tensor]:
        count = len(motion.affine.scale)
        values = [by_channel(each, motion.numbers, count) for each in (self.factor, self.term)]
        factor, term = values
        if factor is None or term is None:
            raise BlockedError(f"the constants of {describe(self.node)} differ within a channel")
        return factor, term


def constant_map(graph: FoldGraph, node: fx.Node) -> ConstantMap | None:
    """Return what a product or sum of one value and constants computes; None for anything else."""
    name, val = operation(node), node.meta.get("val")
    if name not in _OPERATIONS or not isinstance(val, Tensor):
        return None
    operands = [_operand(graph, value) for value in node.args[:2]]
    sources = [value for value in operands if isinstance(value, fx.Node)]
    options = dict(zip(("alpha",), node.args[2:], strict=False)) | node.kwargs
    alpha = options.pop("alpha", 1)
    if not isinstance(alpha, (int, float)) or options or len(sources) != 1:
        return None
    if any(value is None for value in operands):
        return None
    source, first = sources[0], operands[0] is sources[0]
    fake = source.meta["val"]
    if fake.shape != val.shape or fake.dtype != val.dtype or not val.is_floating_point():
        return None
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    constant = next((value for value in operands if isinstance(value, Tensor)), -one)
    if not _from_weights(graph, node, source):
        if not graph.trusts_numbers:
            return None
        graph.uses_numbers = True
    if not constant.isfinite().all() or (name == "div" and not (first and constant.all())):
        return None
    if name == "div":
        return ConstantMap(node, source, 1.0 / constant, zero)
    if name in {"mul", "neg"}:
        return ConstantMap(node, source, constant, zero)
    weights = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[name]
    factor, weight = weights if first else reversed(weights)
    return ConstantMap(node, source, factor * one, weight * constant)


def _from_weights(graph: FoldGraph, node: fx.Node, source: fx.Node) -> bool:
    """Whether the constant comes from stored tensors, not from numbers of the code or of shapes."""
    pending = [value for value in node.all_input_nodes if value is not source]
    found = bool(pending)
    while pending:
        value = pending.pop()
        found = found and (value.op == "placeholder" or bool(value.all_input_nodes))
        pending += value.all_input_nodes
    return found


def _operand(graph: FoldGraph, value: Any) -> fx.Node | Tensor | None:
    """Return a constant as a float64 tensor, a node that varies as it is, None for the rest."""
    if isinstance(value, fx.Node):
        if not graph.is_constant(value):
            return value
        value = graph.value(value)
    if isinstance(value, Tensor):
        return value.double()
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, (int, float)) else None
