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
class _Geometry:
    """Where a kernel's taps fall: everything about a convolution but its weight."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class _Form:
    """`sum of convs + diagonal * x + shift`, linear in one input x.

    Attributes:
        convs: Weights in float64, each with its geometry.
        diagonal: One factor per channel, or None.
        shift: One value per channel, or a single one.
        norms: Norms that are part of the form.
    """

    convs: tuple[tuple[Tensor, _Geometry], ...]
    diagonal: Tensor | None
    shift: Tensor
    norms: tuple[NormCall, ...] = ()

    @property
    def terms(self) -> int:
        """The number of branches."""
        return len(self.convs) + (self.diagonal is not None)

    def scaled(self, factor: Tensor) -> _Form:
        """Return the form with its result multiplied per channel."""
        convs = tuple(
            (weight * factor.reshape((-1,) + (1,) * (weight.ndim - 1)), geometry)
            for weight, geometry in self.convs
        )
        diagonal = None if self.diagonal is None else self.diagonal * factor
        return replace(self, convs=convs, diagonal=diagonal, shift=self.shift * factor)

    def plus(self, other: _Form) -> _Form:
        """Return the sum of two forms."""
        diagonals = [form.diagonal for form in (self, other) if form.diagonal is not None]
        return _Form(
            self.convs + other.convs,
            diagonals[0] + diagonals[-1] if len(diagonals) == 2 else (diagonals or [None])[0],  # type: ignore[list-item]
            self.shift + other.shift,
            self.norms + other.norms,
        )


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
                combined = _combine(form, len(context.graph.shape(top)))
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
) -> _Form | None:
    """Return a node's value as a form in `source`, or None if it is none."""
    channels = _channels(context, node)
    if node is source:
        return _Form((), torch.ones(channels, dtype=torch.float64), _zero())
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
        return _Form((), None, _zero())
    if name in {*_UNCHANGED, "neg"} and not _drops(node):
        form = _expand(context, node.all_input_nodes[0], source)
        return form.scaled(_number(-1.0)) if form is not None and name == "neg" else form
    if name not in _ARITHMETIC or set(node.kwargs) - {"alpha"}:
        return None
    return _arithmetic(context, node, source, channels)


def _drops(node: fx.Node) -> bool:
    """Whether a dropout is in training mode."""
    return "dropout" in operation(node) and bool(node.args[2]) and bool(node.args[1])


def _arithmetic(context: Context, node: fx.Node, source: fx.Node, channels: int) -> _Form | None:
    first, second = (
        _operand(context, node, argument, source, channels) for argument in node.args[:2]
    )
    name = operation(node)
    if first is None or second is None:
        return None
    if name == "div":
        return _divided(first, second)
    if name == "mul":
        if isinstance(first, _Form) == isinstance(second, _Form):
            return None
        return first.scaled(second) if isinstance(first, _Form) else second.scaled(first)  # type: ignore[union-attr, arg-type]
    one, two = (
        part if isinstance(part, _Form) else _Form((), None, part) for part in (first, second)
    )
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return None
    if name == "rsub":  # second - alpha * first
        return two.plus(one.scaled(_number(-float(alpha))))
    return one.plus(two.scaled(_number(float(-alpha if name == "sub" else alpha))))


def _divided(value: _Form | Tensor, by: _Form | Tensor) -> _Form | None:
    if not isinstance(value, _Form) or isinstance(by, _Form) or not bool(by.all()):
        return None
    return value.scaled(1.0 / by)


def _operand(
    context: Context, node: fx.Node, argument: Any, source: fx.Node, channels: int
) -> _Form | Tensor | None:
    """Return an operand as a form, or a constant; None where it is broadcast over positions."""
    graph = context.graph
    if _is_fixed(graph, argument):
        return _factor(context, node, argument, channels)
    if not is_tensor(argument) or graph.shape(argument) != graph.shape(node):
        return None
    return _expand(context, argument, source)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


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


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _conv_form(context: Context, site: Site) -> _Form | None:
    node = site.node
    if operation(node) not in _CONVS or len(context.graph.shape(node)) != site.output_axis + 1 + (
        site.rank
    ):
        return None
    given = site.arguments
    padding = _explicit_padding(given, context.graph.shape(site.weight)[2:])
    if padding is None:
        return None
    geometry = _Geometry(
        _tuple(given["stride"], site.rank),
        _tuple(padding, site.rank),
        _tuple(given["dilation"], site.rank),
        given["groups"],
    )
    bias = site.new_bias()
    return _Form(((site.new_weight(), geometry),), None, _zero() if bias is None else bias)


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


def _combine(form: _Form, rank: int) -> tuple[Tensor, _Geometry] | None:
    """Lay all kernels over each other; None where their taps do not fall on one grid."""
    if not form.convs:
        return None
    (largest, geometry), *_ = sorted(form.convs, key=lambda conv: -conv[0].numel())
    total = torch.zeros_like(largest)
    size = 0
    for weight, own in form.convs:
        window = _window(weight, own, largest, geometry)
        if window is None:
            return None
        total[window] += weight
        size += weight.numel()
    if form.diagonal is not None:
        eye = _identity(form.diagonal, largest, geometry.groups)
        plain = _Geometry((1,) * (rank - 2), (0,) * (rank - 2), geometry.dilation, geometry.groups)
        window = None if eye is None else _window(eye, plain, largest, geometry)
        if eye is None or window is None:
            return None
        total[window] += eye
    return (total, geometry) if total.numel() <= size else None


def _identity(diagonal: Tensor, like: Tensor, groups: int) -> Tensor | None:
    """Return the kernel of size 1 that multiplies each channel, or None if channels change."""
    outputs, width = like.shape[:2]
    if outputs != width * groups or len(diagonal) not in (1, outputs):
        return None
    eye = torch.eye(width, dtype=torch.float64).repeat(groups, 1)
    return (eye * diagonal.reshape(-1, 1)).reshape(outputs, width, *(1,) * (like.ndim - 2))


def _window(
    weight: Tensor, own: _Geometry, largest: Tensor, geometry: _Geometry
) -> tuple[slice, ...] | None:
    """Return where a kernel lies inside the largest one, or None if it does not fit."""
    if own.stride != geometry.stride or own.groups != geometry.groups:
        return None
    if weight.shape[:2] != largest.shape[:2]:
        return None
    window = [slice(None), slice(None)]
    for axis, (padding, outer) in enumerate(zip(own.padding, geometry.padding, strict=True)):
        taps, dilation = weight.shape[axis + 2], geometry.dilation[axis]
        start, rest = divmod(outer - padding, dilation)
        if rest or start < 0 or start + taps > largest.shape[axis + 2]:
            return None
        if taps > 1 and own.dilation[axis] != dilation:
            return None
        window.append(slice(start, start + taps))
    return tuple(window)


def _replace(
    context: Context,
    top: fx.Node,
    source: fx.Node,
    form: _Form,
    combined: tuple[Tensor, _Geometry],
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
