"""Moving a norm's map on, into everything that reads its result.

`W (scale x + shift) + b` is again a linear operation where no input is a padding zero. All readers
must take the map in, or pass it on to readers that do. An activation that limits its input to a
range lets the map pass when it becomes a per-channel clamp (`bnconvert.fold.algebra.Limits`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bnconvert.fold.activations import limits_of
from bnconvert.fold.algebra import swap_with_limits
from bnconvert.fold.channels import UNTOUCHED, along, is_untouched, move_forward
from bnconvert.fold.constants import constant_map
from bnconvert.fold.graph import is_tensor, operation, store
from bnconvert.fold.inplace import WRITTEN
from bnconvert.fold.motion import BlockedError, Motion, describe
from bnconvert.fold.rules import MovesData, pass_through, passage
from bnconvert.fold.search import Absorption, Clamp, Context, Move, reads_shape_only

if TYPE_CHECKING:
    from torch import Tensor, fx

    from bnconvert.fold.sites import Site


def move_on(context: Context, start: fx.Node, motion: Motion, rewrite_activations: bool) -> Move:
    """Return what lets all readers of a node read it before a map instead of after it.

    Args:
        context: The graph and its target.
        start: The node whose value is the result of the map.
        motion: The map.
        rewrite_activations: Whether activations on the way may become clamps.

    Raises:
        BlockedError: A reader neither takes the map in nor passes it on.
    """
    return _Walk(context, rewrite_activations).run(start, motion)


class _Walk:
    """One walk over the readers, in the order of the graph, so that inputs come before users."""

    def __init__(self, context: Context, rewrite_activations: bool) -> None:
        self._context = context
        self._rewrite = rewrite_activations
        self._move = Move()
        self._moving: dict[fx.Node, Motion] = {}
        self._parts: dict[fx.Node, tuple[Tensor, ...]] = {}

    def run(self, start: fx.Node, motion: Motion) -> Move:
        self._moving[start] = motion
        pending = set(start.users)
        if not pending:
            raise BlockedError("nothing reads its result")
        node = start
        while pending:
            node = node.next
            if node in pending:
                pending.discard(node)
                if self._read(node):
                    pending |= set(node.users)
        del self._moving[start]
        self._move.passed = {node: motion.numbers for node, motion in self._moving.items()}
        return self._move

    def _read(self, node: fx.Node) -> bool:
        """Let one reader take the map in, or note the map of its result and return True."""
        sources = [
            source
            for source in node.all_input_nodes
            if source in self._moving and not reads_shape_only(node, source)
        ]
        if not sources:
            return False
        motion = self._moving[sources[0]]
        if any(self._moving[source].affine is not motion.affine for source in sources):
            raise BlockedError(f"{describe(node)} joins different maps")
        for source in sources:
            self._check_edge(source, node)
        site = self._context.site(node)
        if site is not None:
            self._move.absorptions.append(self._into(site, motion))
            return False
        limits = limits_of(node)
        if limits is not None and (motion.shifts or motion.flips):
            self._moving[node] = self._across(node, motion, limits)
            return True
        return self._pass_on(node, motion, sources)

    def _check_edge(self, source: fx.Node, reader: fx.Node) -> None:
        if reader.op == "output":
            raise BlockedError(f"{describe(source)} is an output of the model")
        if reader.target is store:
            raise BlockedError(f"{describe(source)} is also read by {describe(reader)}")
        if WRITTEN in source.meta:
            raise BlockedError(f"{describe(source)} is changed in place by {source.meta[WRITTEN]}")
        self._context.target.check_edge(source, reader)

    def _into(self, site: Site, motion: Motion) -> Absorption:
        channels = along(motion.numbers, site.input_axis, site.channels[1])
        if channels is None:
            raise BlockedError(f"its channels are not the input channels of {describe(site.node)}")
        if site.pads_zeros and motion.shifts:
            raise BlockedError(f"{describe(site.node)} {site.why_no_shift}")
        self._context.check_site(site)
        return Absorption(site, motion.affine.take(channels), before=True)

    def _across(self, node: fx.Node, motion: Motion, limits: tuple[float, float]) -> Motion:
        if not self._rewrite:
            raise BlockedError(f"{describe(node)} follows, and activations are not rewritten")
        self._context.target.check_activation(node)
        swapped = swap_with_limits(motion.affine, *limits, node.meta["val"].dtype)
        self._move.clamps.append(Clamp(node, motion.numbers, swapped, limits))
        return Motion(swapped.outer, motion.numbers)

    def _pass_on(self, node: fx.Node, motion: Motion, sources: list[fx.Node]) -> bool:
        constants = constant_map(self._context.graph, node)
        if constants is not None:
            self._moving[node] = constants.pass_forward(motion)
            return True
        how = passage(self._context.graph, node, motion)
        if operation(node) == "getitem":
            numbers = self._parts[sources[0]][node.args[1]]  # type: ignore[index]
        elif isinstance(how, MovesData):
            maps = {source: self._moving[source].numbers for source in sources}
            moved = move_forward(self._context.graph, node, maps)
            if isinstance(moved, tuple):
                self._parts[node] = moved
                self._moving[node] = motion
                return True
            numbers = moved
        else:
            numbers = pass_through(node, how, motion.numbers)
            if not is_tensor(node):
                self._parts[node] = (numbers, torch.tensor(UNTOUCHED))
        if is_untouched(numbers):
            return False
        self._moving[node] = motion.at(numbers)
        return True
