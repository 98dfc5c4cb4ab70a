"""Making in-place operations of a captured graph functional, where that changes no value.

`relu_(x)` writes into the memory of `x`. When no other node that shares this memory is read
afterwards, the same graph with `relu(x)` computes the same values, and every later reader of `x`
reads the result instead. Otherwise the operation stays as it is, and every node that shares the
memory is marked, so that no fold goes through it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

WAS_INPLACE = "bnconvert_was_inplace"
"""Key in `node.meta`: the operation wrote into its input in the model's own code."""

WRITTEN = "bnconvert_written"
"""Key in `node.meta`: another node writes into this node's memory."""

_RETURN_THEIR_INPUT = {"dropout", "feature_dropout", "alpha_dropout", "contiguous", "reshape", "to"}
"""May return their very input, which their schemas do not say."""


def make_functional(graph: fx.Graph) -> None:
    """Replace in-place operations by functional ones where no other value changes."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = _functional_twin(node)
        if functional is None:
            if _writes(node):
                _mark(node)
            continue
        written = node.args[0]
        later = {user for user in written.users if user is not node and order[user] > order[node]}
        if any(
            order[user] > order[node]
            for alias in _sharing_memory(written) - {written, node}
            for user in alias.users
            if alias not in views_of(node)
        ):
            _mark(node)
            continue
        written.replace_all_uses_with(node, delete_user_cb=later.__contains__)
        node.target = functional
        node.meta[WAS_INPLACE] = True


def shares_memory_with_input(node: fx.Node) -> fx.Node | None:
    """Return the input whose memory the node's value may share, or None."""
    if node.op != "call_function" or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem:
        return source
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.overloadpacket.__name__ in _RETURN_THEIR_INPUT:
        return source
    alias = node.target._schema.arguments[0].alias_info
    return source if alias is not None else None


def _sharing_memory(node: fx.Node) -> set[fx.Node]:
    base = node
    while (source := shares_memory_with_input(base)) is not None:
        base = source
    return {base} | views_of(base)


def views_of(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose values may share the memory of a node's value."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        for user in current.users:
            if user not in found and shares_memory_with_input(user) is current:
                found.add(user)
                pending.append(user)
    return found


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functional_twin(node: fx.Node) -> Any:
    """Return the overload without the trailing underscore, if the node has one."""
    if not _writes(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    packet, overload = node.target.overloadpacket, node.target._overloadname  # type: ignore[union-attr]
    namespace, _, name = packet._qualified_op_name.partition("::")
    if not name.endswith("_"):
        return None
    twin = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(twin, overload, None) if twin is not None else None


def _mark(node: fx.Node) -> None:
    for argument in node.all_input_nodes:
        for alias in _sharing_memory(argument):
            alias.meta[WRITTEN] = node.name
