"""Moving a norm's map back, into the operations that produce what the norm reads.

`scale * (W x + b) + shift` is again a linear operation, so a map ends in a convolution, a Linear or
another norm. On the way it passes operations of `bnconvert.fold.rules`; a sum hands the scale to
all of its terms and the shift to one. Each value on the way must be read by nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from bnconvert.fold.algebra import Affine
from bnconvert.fold.channels import along, is_untouched, move_backward, move_forward
from bnconvert.fold.constants import constant_map
from bnconvert.fold.graph import is_tensor, operation
from bnconvert.fold.inplace import WRITTEN
from bnconvert.fold.motion import BlockedError, Motion, describe
from bnconvert.fold.rules import MovesData, pass_back, passage
from bnconvert.fold.search import Absorption, Context, Move, reads_shape_only

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.fold.norms import NormCall
    from bnconvert.fold.sites import Site


def move_back(context: Context, node: fx.Node, motion: Motion, reader: fx.Node) -> Move:
    """Return what makes the value of a node what it is after a map.

    Args:
        context: The graph and its target.
        node: The producer.
        motion: The map that its value shall have been through.
        reader: The node that asks; any other that reads a touched channel blocks.

    Raises:
        BlockedError: It cannot be done.
    """
    if is_untouched(motion.numbers):
        return Move()
    if WRITTEN in node.meta:
        raise BlockedError(f"{describe(node)} is changed in place by {node.meta[WRITTEN]}")
    if node.op != "call_function" or context.graph.is_constant(node):
        raise BlockedError(f"its input comes from {describe(node)}")
    _check_readers(context, node, motion, reader)
    context.target.check_edge(node, reader)
    move = Move(passed={node: motion.numbers})
    site = context.site(node)
    if site is not None:
        context.check_site(site)
        move.absorptions.append(_into_site(site, motion))
    elif node in context.norms:
        context.target.check_norm(context.norms[node])
        move.absorptions.append(_into_norm(context.norms[node], motion))
    elif (constants := constant_map(context.graph, node)) is not None:
        move.add(move_back(context, constants.source, constants.pass_back(motion), node))
    elif operation(node) in {"add", "sub"}:
        move.add(_through_sum(context, node, motion))
    else:
        mover, sources = _sources(context, node, motion)
        for source, at in sources.items():
            move.add(move_back(context, source, motion.at(at), mover))
    return move


def _check_readers(context: Context, node: fx.Node, motion: Motion, reader: fx.Node) -> None:
    for user in node.users:
        if user is not reader and _reads(context, user, node, motion.numbers):
            raise BlockedError(f"{describe(node)} is also read by {describe(user)}")


def _reads(context: Context, user: fx.Node, node: fx.Node, numbers: Tensor) -> bool:
    """Whether a reader depends on the touched channels of a node's value."""
    if reads_shape_only(user, node):
        return False
    try:
        moves = isinstance(passage(context.graph, user, _probe(numbers)), MovesData)
    except BlockedError:
        return True
    if not moves or operation(user) == "getitem":
        return True
    result = move_forward(context.graph, user, {node: numbers})
    if not isinstance(result, tuple):
        return not is_untouched(result)
    return any(not is_untouched(result[_part(item)]) for item in user.users)


def _probe(numbers: Tensor) -> Motion:
    """Return a motion that every operation which moves data lets through."""
    count = max(int(numbers.max()) + 1, 1)
    return Motion(Affine(torch.ones(count), torch.zeros(count)), numbers)


def _part(item: fx.Node) -> int:
    """Return which of several results a getitem node takes."""
    part = item.args[1]
    assert isinstance(part, int)  # noqa: S101 (always a number in captured graphs)
    return part


def _into_site(site: Site, motion: Motion) -> Absorption:
    channels = along(motion.numbers, site.output_axis, site.channels[0])
    if channels is None:
        raise BlockedError(f"its channels are not the output channels of {describe(site.node)}")
    return Absorption(site, motion.affine.take(channels))


def _into_norm(call: NormCall, motion: Motion) -> Absorption:
    channels = along(motion.numbers, call.axis, len(call.affine.scale))
    if channels is None:
        raise BlockedError(f"its channels are not those of {describe(call.node)}")
    return Absorption(call, motion.affine.take(channels))


def _sources(
    context: Context, node: fx.Node, motion: Motion
) -> tuple[fx.Node, dict[fx.Node, Tensor]]:
    """Return the operation that reads the inputs a map moves to, and their channel maps."""
    mover, wanted = node, {0: motion.numbers}
    if operation(node) == "getitem":
        mover, part = _input(node), _part(node)
        if len([user for user in mover.users if user.args[1] == part]) > 1:
            raise BlockedError(f"{describe(mover)} is read twice")
        wanted = {part: motion.numbers}
    how = passage(context.graph, mover, motion)
    if not isinstance(how, MovesData):
        if 0 not in wanted:
            raise BlockedError(f"{describe(mover)} does not let a per-channel map through")
        return mover, {_input(mover): pass_back(mover, how, motion.numbers)}
    maps = move_backward(context.graph, mover, wanted)
    if maps is None:
        raise BlockedError(f"{describe(mover)} uses one channel as several")
    return mover, maps


def _input(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)  # noqa: S101 (an operation on a tensor)
    return source


def _through_sum(context: Context, node: fx.Node, motion: Motion) -> Move:
    """Give every term the scale, and the first that takes it the shift."""
    terms = [term for term in node.args[:2] if isinstance(term, fx.Node) and is_tensor(term)]
    weighted = len(node.args) > 2 or "alpha" in node.kwargs
    if len(set(terms)) != 2 or weighted:
        raise BlockedError(f"{describe(node)} does not let a per-channel map through")
    subtracted = operation(node) == "sub"
    reason: BlockedError | None = None
    for shifted in range(1 if subtracted or not motion.shifts else 2):
        move = Move()
        try:
            for place, term in enumerate(terms):
                part = motion if place == shifted else motion.without_shift()
                move.add(_term(context, node, term, part))
        except BlockedError as blocked:
            reason = reason or blocked
        else:
            return move
    assert reason is not None  # noqa: S101 (the loop ran)
    raise reason


def _term(context: Context, node: fx.Node, term: fx.Node, motion: Motion) -> Move:
    if not motion.shifts and not (motion.touched.scale != 1).any():
        return Move()
    shape = context.graph.shape(term)
    lead = motion.numbers.ndim - len(shape)
    kept = motion.numbers.shape[lead:]
    spread = any(size != 1 for size in motion.numbers.shape[:lead])
    if spread or any(have not in (1, size) for have, size in zip(kept, shape, strict=True)):
        raise BlockedError(f"{describe(node)} spreads a value over several channels")
    return move_back(context, term, motion.at(motion.numbers.reshape(kept)), node)
