"""Merging parallel linear branches of one input into one convolution, in graph form.

A sum or difference of convolutions of the same input, of its norms, of per-channel multiples of it
and of the input itself is linear in that input, so one convolution computes it: the kernels are
laid over each other at their centres, and the input itself is a kernel with ones at its centre
(Ding et al. 2021, "RepVGG", https://arxiv.org/abs/2101.03697, section 3.3). The code knows no
model: it expands a sum until every term is linear in one candidate input, or gives up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from bnconvert.fold.graph import Added, FoldGraph, is_tensor, operation
from bnconvert.fold.linear_form import Geometry, LinearForm, combine, number, zero
from bnconvert.fold.norms import path_of
from bnconvert.fold.planner import erase_dead

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.fold.norms import NormCall
    from bnconvert.fold.search import Context
    from bnconvert.fold.sites import Site

_CONVS = {
    "conv1d": torch.ops.aten.conv1d.default,
    "conv2d": torch.ops.aten.conv2d.default,
    "conv3d": torch.ops.aten.conv3d.default,
}
_ARITHMETIC = {"add", "sub", "rsub", "mul", "div"}
_UNCHANGED = {"alias", "clone", "contiguous", "detach", "dropout", "feature_dropout"}
_EXPANDED = {*_ARITHMETIC, *_UNCHANGED, "neg", "batch_norm", "instance_norm", "getitem"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}


@dataclass(frozen=True)
class Merged:
    """A convolution that replaced several branches.

    Attributes:
        node: The convolution.
        norms: The norms that are now part of it.
    """

    node: fx.Node
    norms: tuple[NormCall, ...]


def merge_branches(context: Context) -> list[Merged]:
    """Merge every sum of branches that can be merged, outermost sums first."""
    merged = []
    for root in reversed(list(context.graph.graph.nodes)):
        if not root._erased and operation(root) in {"add", "sub", "rsub"}:
            merged += _merge_at(context, root)
    return merged


def _merge_at(context: Context, root: fx.Node) -> list[Merged]:
    for top in (_last_linear(context, root), root):
        leaves: list[Site] = []
        _collect(context, top, leaves, outermost=True)
        for source in dict.fromkeys(site.source for site in leaves):
            form = _expand(context, top, source, outermost=True)
            if form is not None and form.terms > 1:
                combined = combine(form, len(context.graph.shape(top)))
                if combined is not None:
                    return [_replace(context, top, source, form, combined)]
        if top is root:
            break
    return []


def _last_linear(context: Context, root: fx.Node) -> fx.Node:
    """Return the last of the single-use linear operations that follow a sum."""
    node = root
    while len(node.users) == 1:
        user = next(iter(node.users))
        if operation(user) not in _EXPANDED or not is_tensor(user):
            break
        node = user
    return node


def _collect(context: Context, node: fx.Node, leaves: list[Site], outermost: bool = False) -> None:
    """Collect the convolutions at the ends of a sum."""
    if not outermost and len(node.users) > 1:
        return
    site = context.site(node)
    if site is not None:
        if operation(node) in _CONVS:
            leaves.append(site)
        return
    call = context.norms.get(node)
    if call is not None:
        _collect(context, call.source, leaves)
    elif operation(node) in {*_ARITHMETIC, *_UNCHANGED, "neg"}:
        for source in node.all_input_nodes:
            if not context.graph.is_constant(source):
                _collect(context, source, leaves)


def _expand(
    context: Context, node: fx.Node, source: fx.Node, outermost: bool = False
) -> LinearForm | None:
    """Return a node's value as a form in `source`, or None if it is none."""
    channels = _channels(context, node)
    if node is source:
        return LinearForm((), torch.ones(channels, dtype=torch.float64), zero())
    if (not outermost and len(node.users) > 1) or not is_tensor(node):
        return None
    site = context.site(node)
    if site is not None:
        return _conv_form(context, site) if site.source is source else None
    call = context.norms.get(node)
    if call is not None:
        form = _expand(context, call.source, source)
        if form is None:
            return None
        form = form.scaled(call.affine.scale)
        return replace(form, shift=form.shift + call.affine.shift, norms=(*form.norms, call))
    name = operation(node)
    if name in _ZEROS:
        return LinearForm((), None, zero())
    if name in {*_UNCHANGED, "neg"} and not _drops(node):
        form = _expand(context, node.all_input_nodes[0], source)
        return form.scaled(number(-1.0)) if form is not None and name == "neg" else form
    if name not in _ARITHMETIC or set(node.kwargs) - {"alpha"}:
        return None
    return _arithmetic(context, node, source, channels)


def _drops(node: fx.Node) -> bool:
    """Whether a dropout is in training mode."""
    return "dropout" in operation(node) and bool(node.args[2]) and bool(node.args[1])


def _arithmetic(
    context: Context, node: fx.Node, source: fx.Node, channels: int
) -> LinearForm | None:
    first, second = (
        _operand(context, node, argument, source, channels) for argument in node.args[:2]
    )
    name = operation(node)
    if first is None or second is None:
        return None
    if name == "div":
        return _divided(first, second)
    if name == "mul":
        if isinstance(first, LinearForm) == isinstance(second, LinearForm):
            return None
        return first.scaled(second) if isinstance(first, LinearForm) else second.scaled(first)  # type: ignore[union-attr, arg-type]
    one, two = (
        part if isinstance(part, LinearForm) else LinearForm((), None, part)
        for part in (first, second)
    )
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return None
    if name == "rsub":  # second - alpha * first
        return two.plus(one.scaled(number(-float(alpha))))
    return one.plus(two.scaled(number(float(-alpha if name == "sub" else alpha))))


def _divided(value: LinearForm | Tensor, by: LinearForm | Tensor) -> LinearForm | None:
    if not isinstance(value, LinearForm) or isinstance(by, LinearForm) or not bool(by.all()):
        return None
    return value.scaled(1.0 / by)


def _operand(
    context: Context, node: fx.Node, argument: Any, source: fx.Node, channels: int
) -> LinearForm | Tensor | None:
    """Return an operand as a form, or a constant; None where it is broadcast over positions."""
    graph = context.graph
    if _is_fixed(graph, argument):
        return _factor(context, node, argument, channels)
    if not is_tensor(argument) or graph.shape(argument) != graph.shape(node):
        return None
    return _expand(context, argument, source)


def _is_fixed(graph: FoldGraph, argument: Any) -> bool:
    return not isinstance(argument, fx.Node) or graph.is_constant(argument)


def _factor(context: Context, node: fx.Node, argument: Any, channels: int) -> Tensor | None:
    """Return a constant operand as one value, or one per channel; None for any other shape."""
    if isinstance(argument, (int, float)):
        return torch.tensor(float(argument), dtype=torch.float64)
    if not isinstance(argument, fx.Node):
        return None
    values: Tensor = context.graph.value(argument)
    rank = len(context.graph.shape(node))
    shape = (1,) * (rank - values.ndim) + tuple(values.shape)
    if any(size != 1 for axis, size in enumerate(shape) if axis != 1):
        return None
    return values.double().flatten() if shape[1] == channels else values.double().reshape(())


def _channels(context: Context, node: fx.Node) -> int:
    shape = context.graph.shape(node) if is_tensor(node) else ()
    return shape[1] if len(shape) > 1 else 1


def _conv_form(context: Context, site: Site) -> LinearForm | None:
    node = site.node
    if operation(node) not in _CONVS or len(context.graph.shape(node)) != site.output_axis + 1 + (
        site.rank
    ):
        return None
    given = site.arguments
    padding = _explicit_padding(given, context.graph.shape(site.weight)[2:])
    if padding is None:
        return None
    geometry = Geometry(
        _tuple(given["stride"], site.rank),
        _tuple(padding, site.rank),
        _tuple(given["dilation"], site.rank),
        given["groups"],
    )
    bias = site.new_bias()
    return LinearForm(((site.new_weight(), geometry),), None, zero() if bias is None else bias)


def _explicit_padding(given: dict[str, Any], kernel: tuple[int, ...]) -> Any:
    """Return the padding in numbers; None where it differs between the two ends."""
    padding = given["padding"]
    if not isinstance(padding, str):
        return padding
    if padding == "valid":
        return 0
    added = [
        d * (k - 1) for d, k in zip(_tuple(given["dilation"], len(kernel)), kernel, strict=True)
    ]
    return None if any(total % 2 for total in added) else [total // 2 for total in added]


def _tuple(values: Any, rank: int) -> tuple[int, ...]:
    values = [values] if isinstance(values, int) else list(values)
    return tuple(values) if len(values) == rank else tuple(values) * rank


def _replace(
    context: Context,
    top: fx.Node,
    source: fx.Node,
    form: LinearForm,
    combined: tuple[Tensor, Geometry],
) -> Merged:
    graph, (weight, geometry) = context.graph, combined
    model = next(
        site.node
        for site in _leaf_sites(context, top)
        if site.new_weight().numel() == weight.numel()
    )
    stem = path_of(model) or top.name
    like = model.args[1]
    assert isinstance(like, fx.Node)  # noqa: S101 (a convolution's weight)
    bias = form.shift.expand(weight.shape[0]).clone()
    constants = [
        graph.add_constant(Added(values, f"{stem}.{name}"), like=like)
        for name, values in (("weight", weight), ("bias", bias))
    ]
    with graph.graph.inserting_before(top):
        conv = graph.graph.call_function(
            _CONVS[operation(model)],
            (
                source,
                *constants,
                list(geometry.stride),
                list(geometry.padding),
                list(geometry.dilation),
                geometry.groups,
            ),
        )
    conv.meta.update(model.meta)
    conv.meta["val"] = top.meta["val"]
    top.replace_all_uses_with(conv)
    for call in context.norms.values():
        if call.source is top:
            call.source = conv
    for call in form.norms:
        context.norms.pop(call.node, None)
    erase_dead(graph.graph, top)
    return Merged(conv, form.norms)


def _leaf_sites(context: Context, top: fx.Node) -> list[Site]:
    leaves: list[Site] = []
    _collect(context, top, leaves, outermost=True)
    return leaves
