"""Deciding, norm by norm, where each goes, and editing the captured graph accordingly.

Every norm is tried backward, then forward, then with its shift going backward and its scale
forward; what succeeds is done in the graph at once, so that the next norm sees the result. The
rounds end when nothing more moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from bnconvert.fold.algebra import cast
from bnconvert.fold.backward import move_back
from bnconvert.fold.forward import move_on
from bnconvert.fold.graph import Added
from bnconvert.fold.motion import BlockedError, Motion
from bnconvert.fold.norms import NormCall, path_of
from bnconvert.fold.search import Clamp, Context, Move

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Group:
    """All calls of one norm; they are folded together or not at all.

    Attributes:
        calls: The calls, in the order of the graph.
        name: Qualified name, or the node's name for a norm outside any module.
        type: Class name, or the operation's name for a norm outside any module.
        refusal: Why the norm must be left, known beforehand; "" if it may be folded.
        move: What was done; None while the norm is left.
        how: Which way it went: "backward", "forward", "split" or "merged".
        merged_into: The convolutions of merged branches that it became part of.
        reasons: Why each way is barred, in the last round.
    """

    calls: list[NormCall]
    name: str
    type: str
    refusal: str = ""
    move: Move | None = None
    how: str = ""
    merged_into: list[fx.Node] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why the norm is left, as one sentence."""
        return self.refusal or "; ".join(dict.fromkeys(self.reasons))

    @property
    def targets(self) -> list[str]:
        """What the norm went into, by qualified name."""
        assert self.move is not None  # noqa: S101 (asked of folded norms)
        nodes = [absorption.into.node for absorption in self.move.absorptions] + self.merged_into
        return list(dict.fromkeys(path_of(node) or node.name for node in nodes))


_Way = Callable[[Context, NormCall, bool], Move]


def _backward(context: Context, call: NormCall, rewrite: bool) -> Move:
    motion = Motion(call.affine, call.numbers(context.graph))
    return move_back(context, call.source, motion, call.reader)


def _forward(context: Context, call: NormCall, rewrite: bool) -> Move:
    motion = Motion(call.affine, call.numbers(context.graph))
    return move_on(context, call.node, motion, rewrite)


def _split(context: Context, call: NormCall, rewrite: bool) -> Move:
    """Write `scale * x + shift` as `scale * (x + shift / scale)` and move the two apart."""
    motion = Motion(call.affine, call.numbers(context.graph))
    if not call.affine.scale.all():
        channel = int((call.affine.scale == 0).nonzero()[0])
        raise BlockedError(
            f"its scale is 0 in channel {channel}, so its shift cannot be moved back"
        )
    move = move_back(context, call.source, motion.without_scale(), call.reader)
    move.add(move_on(context, call.node, motion.without_shift(), rewrite))
    return move


_WAYS: dict[str, _Way] = {"backward": _backward, "forward": _forward, "split": _split}


class Planner:
    """Folds the norms of a context's graph.

    Attributes:
        groups: The norms, with what became of them.
        changed: Nodes of the graph as captured whose value folding changes.
        clamps: Lower and upper bounds of the clamps, by the activation that each replaced.
    """

    def __init__(
        self, context: Context, groups: Sequence[Group], rewrite_activations: bool
    ) -> None:
        self.groups = list(groups)
        self.clamps: dict[fx.Node, tuple[Tensor, Tensor]] = {}
        self.changed: set[fx.Node] = set()
        self._context = context
        self._rewrite = rewrite_activations
        for group in self.groups:
            for call in group.calls:
                context.norms[call.node] = call

    def run(self) -> None:
        """Fold until nothing moves any more.

        Raises:
            BnconvertError: A norm has a scale or shift that is not finite or overflows.
        """
        self._check_finite()
        progress = True
        while progress:
            progress = False
            for group in self.groups:
                group.reasons = []
            for how in _WAYS:
                for group in self.groups:
                    if group.move is None and not group.refusal:
                        progress |= self._try(group, how)

    def note_merged(self, call: NormCall, into: fx.Node) -> None:
        """Record that a norm became part of a convolution that stands for several branches."""
        for group in self.groups:
            if call in group.calls:
                group.move, group.how, group.merged_into = Move(), "merged", [into]

    def _check_finite(self) -> None:
        for group in self.groups:
            for call in group.calls if not group.refusal else []:
                cast(call.affine.scale, torch.float64, f"{group.name}: its scale")
                cast(call.affine.shift, torch.float64, f"{group.name}: its shift")

    def _try(self, group: Group, how: str) -> bool:
        move = Move()
        try:
            for call in group.calls:
                move.add(_WAYS[how](self._context, call, self._rewrite))
                self._context.target.check_removal(call)
        except BlockedError as blocked:
            if how != "split":  # it is barred by what bars one of the others
                group.reasons.append(str(blocked))
            return False
        group.move, group.how = move, how
        self.changed |= set(move.passed)
        if how != "backward":
            self.changed |= {call.node for call in group.calls}
        for call in group.calls:
            self._check_overflow(group, call)
            self._context.target.note_removal(call)
        for absorption in move.absorptions:
            absorption.apply()
        for clamp in move.clamps:
            self._clamp(clamp)
        for call in group.calls:
            self._remove(call)
        return True

    def _check_overflow(self, group: Group, call: NormCall) -> None:
        dtype = call.node.meta["val"].dtype
        cast(call.affine.scale, dtype, f"{group.name}: its scale")
        cast(call.affine.shift, dtype, f"{group.name}: its shift")

    def _remove(self, call: NormCall) -> None:
        del self._context.norms[call.node]
        call.node.replace_all_uses_with(call.source)
        for other in self._context.norms.values():
            if other.source is call.node:
                other.source = call.source
        erase_dead(self._context.graph.graph, call.node)

    def _clamp(self, clamp: Clamp) -> None:
        graph, node = self._context.graph, clamp.node
        bounds = clamp_bounds(clamp)
        stem = path_of(node) or node.name
        constants = [
            graph.add_constant(Added(bound, f"{stem}.{name}", bounds=True), node)
            if bound.isfinite().any()
            else None
            for bound, name in zip(bounds, ("lower", "upper"), strict=True)
        ]
        new = node.args[0]
        assert isinstance(new, fx.Node)  # noqa: S101 (the activation's input)
        if any(constants):
            with graph.graph.inserting_after(node):
                new = graph.graph.call_function(torch.ops.aten.clamp.Tensor, (new, *constants))
            new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        for other in self._context.norms.values():
            if other.source is node:
                other.source = new
        graph.graph.erase_node(node)
        self.clamps[node] = bounds


def clamp_bounds(clamp: Clamp) -> tuple[Tensor, Tensor]:
    """Return the bounds of a clamp in float64, of a shape that broadcasts against its input."""
    index = clamp.numbers.to(torch.int64)
    touched, index = index >= 0, index.clamp(min=0)
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in clamp.inside)
    return (
        torch.where(touched, clamp.limits.lower[index], low),
        torch.where(touched, clamp.limits.upper[index], high),
    )


def erase_dead(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing reads, and what only it read."""
    if node.users or node.op != "call_function":
        return
    inputs = list(node.all_input_nodes)
    graph.erase_node(node)
    for source in inputs:
        erase_dead(graph, source)
