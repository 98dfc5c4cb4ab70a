"""Making synchronised BatchNorm layers plain again, those of other libraries included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from bnconvert.errors import BnconvertError, UnknownLayerError
from bnconvert.layers import Kind, classes, foreign
from bnconvert.layers.group import GROUP_KEY
from bnconvert.layers.swap import swap_class
from bnconvert.plan import Edit, Plan, without_collection
from bnconvert.probe import input_dims
from bnconvert.report import LayerReport, Outcome, Report
from bnconvert.selection import Patterns, Selection
from bnconvert.walk import Norm, find_norms, refuse_replaced

if TYPE_CHECKING:
    from bnconvert.layers.foreign import ForeignSync

ModelT = TypeVar("ModelT", bound=nn.Module)

_SPATIAL_DIMS = {2: 1, 3: 1, 4: 2, 5: 3}
"""Number of dimensions of a layer's input -> the 1, 2 or 3 of its class."""


def revert_sync_batchnorm(
    model: ModelT,
    *,
    example_inputs: Any = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
) -> ModelT:
    """Make the synchronised BatchNorm layers of a model plain, in place.

    Layers that bnconvert converted get the very class from before, and nothing of bnconvert stays
    in them. Layers of torch, timm, apex, mmcv, detectron2 and others become `nn.BatchNorm1d`, `2d`
    or `3d`, whichever fits what they are given.

    Args:
        model: Any module.
        example_inputs: Input to run the model on, where a layer's class does not tell whether it is
            1d, 2d or 3d: a tensor, a tuple of positional or a dict of keyword arguments. The model
            runs in eval mode, and its statistics and flags stay as they are.
        include: Revert only these layers: fnmatch patterns on qualified names, or a function
            `(name, module) -> bool`.
        exclude: Leave these layers, likewise.

    Returns:
        The same model.

    Raises:
        UnknownLayerError: A subclass of a synchronised layer runs code of its own, or the `forward`
            of a layer was replaced on the instance after it was converted.
        BnconvertError: `include` matches no layer, the dimension of a layer is unknown, or the
            model does not run on the example; nothing was changed.
    """
    return plan_revert_sync_batchnorm(
        model, example_inputs=example_inputs, include=include, exclude=exclude
    ).apply()


@without_collection()
def plan_revert_sync_batchnorm(
    model: ModelT,
    *,
    example_inputs: Any = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
) -> Plan[ModelT]:
    """Plan `revert_sync_batchnorm`, which has the same arguments and errors; changes nothing."""
    selection = Selection(include, exclude)
    norms = find_norms(model)
    selection.refuse_idle(norms)
    why_not = [selection.why_not(norm) or _why_left(norm) for norm in norms]
    chosen = [norm for norm, reason in zip(norms, why_not, strict=True) if not reason]
    refuse_replaced([norm for norm in chosen if norm.kind is Kind.SYNC], "synchronised")
    _refuse_unknown(chosen)
    dims = _dimensions(model, chosen, example_inputs)
    layers: list[LayerReport] = []
    edits: list[Edit] = []
    for norm, reason in zip(norms, why_not, strict=True):
        if reason:
            layers += norm.entries(Outcome.LEFT, reason=reason)
            continue
        target, dropped = _plain(norm, dims)
        edits.append(swap_class(norm.module, norm.name, target, drop=dropped))
        layers += norm.entries(Outcome.REVERTED, now=target.__name__)
    return Plan(model, Report("revert", tuple(layers)), edits)


def _why_left(norm: Norm) -> str:
    if norm.kind is Kind.SYNC or _is_frozen_sync(norm):
        return ""
    if norm.kind is Kind.FOREIGN_SYNC:
        known = foreign.describe(norm.module)
        return foreign.blocker(norm.module, known) if known else ""
    if norm.kind is Kind.FROZEN and (known := foreign.describe(norm.module)) is not None:
        return f"it is frozen, and synchronised by {known.library} once unfrozen; unfreeze it first"
    return f"it is not synchronised ({norm.kind.value})"


def _is_frozen_sync(norm: Norm) -> bool:
    """Whether a frozen layer would be synchronised again when it is unfrozen."""
    return norm.kind is Kind.FROZEN and GROUP_KEY in norm.module.__dict__


def _refuse_unknown(chosen: list[Norm]) -> None:
    unknown = [norm for norm in chosen if _is_unknown_subclass(norm)]
    if unknown:
        listed = "; ".join(
            f"{n.name or 'the model'}: {type(n.module).__qualname__} is a subclass with own code"
            for n in unknown
        )
        raise UnknownLayerError(
            f"{len(unknown)} synchronised layers cannot be made plain ({listed}); exclude them"
        )


def _is_unknown_subclass(norm: Norm) -> bool:
    if norm.kind is Kind.SYNC:
        return classes.origin_of(classes.bottom(type(norm.module))) is None
    known = foreign.describe(norm.module)
    return known is not None and foreign.overrides_forward(norm.module, known)


def _dimensions(model: nn.Module, chosen: list[Norm], example_inputs: Any) -> dict[int, int]:
    """Return 1, 2 or 3 by the `id` of each foreign layer."""
    dims: dict[int, int] = {}
    open_ends: list[Norm] = []
    for norm in chosen:
        known = foreign.describe(norm.module) if norm.kind is Kind.FOREIGN_SYNC else None
        if known is not None and known.dims is not None:
            dims[id(norm.module)] = known.dims
        elif known is not None:
            open_ends.append(norm)
    if not open_ends:
        return dims
    if example_inputs is None:
        raise BnconvertError(
            f"{_listed(open_ends)}: {type(open_ends[0].module).__name__} does not tell whether it "
            "was 1d, 2d or 3d; give example_inputs"
        )
    seen = input_dims(model, [norm.module for norm in open_ends], example_inputs)
    unreached = [norm for norm in open_ends if not seen[id(norm.module)]]
    if unreached:
        raise BnconvertError(
            f"{_listed(unreached)}: not reached by example_inputs, so whether 1d, 2d or 3d is "
            "unknown; give inputs that reach it, or exclude it"
        )
    for norm in open_ends:
        found = {_SPATIAL_DIMS.get(n, 0) for n in seen[id(norm.module)]}
        if len(found) != 1 or 0 in found:
            raise BnconvertError(
                f"{norm.name}: takes inputs of {sorted(seen[id(norm.module)])} dimensions, which "
                "no single BatchNorm class does; exclude it"
            )
        dims[id(norm.module)] = found.pop()
    return dims


def _listed(norms: list[Norm]) -> str:
    names = [norm.name or "the model" for norm in norms]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _plain(norm: Norm, dims: dict[int, int]) -> tuple[type[nn.Module], tuple[str, ...]]:
    """Return the plain class of a synchronised layer, and the attributes that go away with it."""
    cls = type(norm.module)
    if norm.kind is Kind.SYNC:
        derived = classes.origin_of(classes.bottom(cls))
        assert derived is not None  # noqa: S101 (_refuse_unknown)
        return classes.rebase(cls, derived[1]), (GROUP_KEY,)
    if norm.kind is Kind.FROZEN:
        return cls, (GROUP_KEY,)
    known: ForeignSync | None = foreign.describe(norm.module)
    assert known is not None  # noqa: S101 (its kind says so)
    target = foreign.plain_class(norm.module, known, dims[id(norm.module)])
    library = foreign.library_class(norm.module, known)
    return classes.rebase(cls, target, library), known.attributes
