"""Freezing BatchNorm layers so that they stay frozen, and bringing them back.

Setting `momentum=0`, `requires_grad=False` or `eval()` freezes a part of a layer until the next
`model.train()`. Here the class of the layer is changed, as conversion does, to one that normalizes
with its stored statistics in every mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from bnconvert.errors import BnconvertError, UnknownLayerError
from bnconvert.layers import Kind, classes, families
from bnconvert.layers.frozen import (
    FROZEN_KEY,
    FrozenState,
    affine_parameters,
    frozen_state,
    not_parameters,
    recorded_flags,
)
from bnconvert.layers.group import GROUP_KEY
from bnconvert.layers.kinds import why_unknown
from bnconvert.layers.own_forward import replaces_forward
from bnconvert.layers.swap import swap_class
from bnconvert.plan import Edit, Plan, Undo
from bnconvert.report import LayerReport, Outcome, Report
from bnconvert.selection import Patterns, Selection
from bnconvert.walk import Norm, find_norms, refuse_replaced

if TYPE_CHECKING:
    from collections.abc import Mapping

ModelT = TypeVar("ModelT", bound=nn.Module)

_WHY_LEFT = {
    Kind.FOREIGN_FROZEN: "{type} is frozen already: it uses stored statistics only",
    Kind.IN_PLACE: "{type} normalizes and activates in place, which a frozen class cannot do",
    Kind.LAZY: "{type} has no channels yet; run a batch through the model first",
    Kind.SCRIPTED: "it is scripted, and its code is fixed; freeze before torch.jit.script",
    Kind.EXPORTED: "it is an exported graph, and its code is fixed; freeze before export",
}


def freeze_batchnorm(
    model: ModelT,
    *,
    stats: bool = True,
    affine: bool = True,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
) -> ModelT:
    """Freeze the BatchNorm layers of a model, in place.

    Layers with frozen statistics normalize in train mode as in eval mode, bit for bit, and nothing
    moves their statistics. A frozen weight or bias does not require a gradient, and its `grad` is
    dropped, so that no optimizer moves it. Parameters, momentum, counters and hooks stay, and so
    does what a synchronised layer needs to be synchronised again after `unfreeze_batchnorm`.
    Freezing again adds what was not frozen yet.

    Args:
        model: Any module; a BatchNorm itself is frozen too.
        stats: Freeze the running statistics.
        affine: Freeze weight and bias.
        include: Freeze only these layers: fnmatch patterns on qualified names, or a function
            `(name, module) -> bool`.
        exclude: Leave these layers, likewise.

    Returns:
        The same model.

    Raises:
        UnknownLayerError: Layers that look like BatchNorm run code of their own, so that it is
            unknown what freezing their statistics means; nothing was changed.
        BnconvertError: Neither `stats` nor `affine` is to be frozen, `include` matches no layer, or
            weight and bias are in a flat parameter of FSDP; nothing was changed.
    """
    return plan_freeze_batchnorm(
        model, stats=stats, affine=affine, include=include, exclude=exclude
    ).apply()


def plan_freeze_batchnorm(
    model: ModelT,
    *,
    stats: bool = True,
    affine: bool = True,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
) -> Plan[ModelT]:
    """Plan `freeze_batchnorm`, which has the same arguments and errors; changes nothing."""
    if not stats and not affine:
        raise BnconvertError("freeze: stats and affine are both False; freeze one of them or both")
    selection = Selection(include, exclude)
    norms = find_norms(model)
    selection.refuse_idle(norms)
    chosen = [norm for norm in norms if not selection.why_not(norm)]
    if stats:
        _refuse_unknown(chosen)
    if affine:
        _refuse_flattened(chosen)
    recorded = _recorded_flags(norms)
    layers: list[LayerReport] = []
    edits: list[Edit] = []
    for norm in norms:
        reason = selection.why_not(norm) or _why_left(norm, stats=stats, affine=affine)
        if reason:
            layers += norm.entries(Outcome.LEFT, reason=reason)
        else:
            now, own = _freeze_layer(norm, recorded, stats=stats, affine=affine)
            layers += norm.entries(Outcome.FROZEN, now=now)
            edits += own
    return Plan(model, Report("freeze", tuple(layers)), edits)


def unfreeze_batchnorm(
    model: ModelT, *, include: Patterns | None = None, exclude: Patterns | None = None
) -> ModelT:
    """Take back `freeze_batchnorm`, in place: class, `requires_grad` flags and process group.

    Args:
        model: Any module.
        include: Unfreeze only these layers: fnmatch patterns on qualified names, or a function
            `(name, module) -> bool`.
        exclude: Leave these layers, likewise.

    Returns:
        The same model.

    Raises:
        UnknownLayerError: The `forward` of a frozen layer was replaced on the instance, and would
            stay frozen; nothing was changed.
        BnconvertError: `include` matches no layer.
    """
    return plan_unfreeze_batchnorm(model, include=include, exclude=exclude).apply()


def plan_unfreeze_batchnorm(
    model: ModelT, *, include: Patterns | None = None, exclude: Patterns | None = None
) -> Plan[ModelT]:
    """Plan `unfreeze_batchnorm`, which has the same arguments and errors; changes nothing."""
    selection = Selection(include, exclude)
    norms = find_norms(model)
    selection.refuse_idle(norms)
    refuse_replaced(
        [n for n in norms if n.kind is Kind.FROZEN and not selection.why_not(n)], "frozen"
    )
    held = _recorded_flags([norm for norm in norms if selection.why_not(norm)])
    layers: list[LayerReport] = []
    edits: list[Edit] = []
    for norm in norms:
        state = frozen_state(norm.module)
        reason = selection.why_not(norm)
        if not reason and state is None:
            reason = f"it is not frozen by bnconvert ({norm.kind.value})"
        if reason or state is None:
            layers += norm.entries(Outcome.LEFT, reason=reason)
            continue
        target = _thawed_class(norm.module) if state.stats else type(norm.module)
        edits.append(swap_class(norm.module, norm.name, target, drop=(FROZEN_KEY,)))
        parameters = affine_parameters(norm.module)
        flags = {
            name: required and id(parameters[name]) not in held
            for name, required in recorded_flags(state, norm.module).items()
        }
        edits.append(_require_grad(norm.module, flags))
        layers += norm.entries(Outcome.UNFROZEN, now=target.__name__)
    return Plan(model, Report("unfreeze", tuple(layers)), edits)


def _why_left(norm: Norm, *, stats: bool, affine: bool) -> str:
    module, name = norm.module, type(norm.module).__name__
    state = frozen_state(module) or FrozenState(stats=False, requires_grad=None)
    if norm.kind is Kind.LAZY or (stats and norm.kind in _WHY_LEFT):
        return _WHY_LEFT[norm.kind].format(type=name)
    if stats and module._buffers.get("running_mean") is None:
        return "it has no running statistics (track_running_stats=False) to freeze it at"
    if stats and norm.kind is Kind.SYNC and classes.origin_of(classes.bottom(type(module))) is None:
        return f"{name} is a subclass of a synchronised layer, with no class to go back to"
    if affine and not stats and not affine_parameters(module):
        return "it has neither weight nor bias (affine=False)"
    adds_stats = stats and not state.stats
    adds_affine = affine and state.requires_grad is None
    return "" if adds_stats or adds_affine else "it is frozen already"


def _refuse_unknown(chosen: list[Norm]) -> None:
    unknown = [norm for norm in chosen if not _has_frozen_class(norm)]
    if unknown:
        listed = "; ".join(
            f"{norm.name or 'the model'}: {why_unknown(norm.module)}" for norm in unknown
        )
        raise UnknownLayerError(
            f"{len(unknown)} BatchNorm-like layers whose statistics cannot be frozen ({listed}); "
            "exclude them, or freeze them with stats=False"
        )


def _refuse_flattened(chosen: list[Norm]) -> None:
    for norm in chosen:
        if names := not_parameters(norm.module):
            raise BnconvertError(
                f"{norm.name or 'the model'}: its {' and '.join(names)} cannot be frozen, being no "
                "parameters of the layer: FSDP keeps them in one flat parameter unless "
                "use_orig_params=True; freeze with affine=False"
            )


def _has_frozen_class(norm: Norm) -> bool:
    if norm.kind is Kind.UNKNOWN or (norm.kind is Kind.SYNC and replaces_forward(norm.module)):
        return False
    if norm.kind is not Kind.FOREIGN_SYNC:
        return True
    return families.frozen_mixin(classes.bottom(type(norm.module))) is not None


def _recorded_flags(norms: list[Norm]) -> dict[int, bool]:
    """Return what frozen layers recorded about their parameters, by `id`.

    A parameter of several layers has to come back as it was before the first of them was frozen,
    and only when the last of them is not frozen any more.
    """
    recorded: dict[int, bool] = {}
    for norm in norms:
        parameters = affine_parameters(norm.module)
        for name, required in recorded_flags(frozen_state(norm.module), norm.module).items():
            recorded[id(parameters[name])] = required
    return recorded


def _freeze_layer(
    norm: Norm, recorded: Mapping[int, bool], *, stats: bool, affine: bool
) -> tuple[str, list[Edit]]:
    """Return what becomes of a layer, in words, and the edits that do it."""
    module, cls = norm.module, type(norm.module)
    before = frozen_state(module) or FrozenState(stats=False, requires_grad=None)
    flags = before.requires_grad
    if affine and flags is None:
        flags = {
            name: recorded.get(id(parameter), parameter.requires_grad)
            for name, parameter in affine_parameters(module).items()
        }
    state = FrozenState(before.stats or stats, flags)
    target = _frozen_class(cls) if stats and not before.stats else cls
    edits = [
        swap_class(module, norm.name, target, add={FROZEN_KEY: state}),
        _require_grad(module, dict.fromkeys(flags or {}, False)),
    ]
    parts = [part for part, on in (("statistics", state.stats), ("affine", flags)) if on]
    return f"{target.__name__} ({' and '.join(parts)} frozen)", edits


def _frozen_class(cls: type[nn.Module]) -> type[nn.Module]:
    origin = _plain(classes.bottom(cls))
    mixin = families.frozen_mixin(origin)
    assert mixin is not None  # noqa: S101 (_refuse_unknown)
    return classes.rebase(cls, classes.derive(mixin, origin))


def _plain(cls: type[nn.Module]) -> type[nn.Module]:
    derived = classes.origin_of(cls)
    return cls if derived is None else derived[1]


def _thawed_class(module: nn.Module) -> type[nn.Module]:
    """Return the class from before freezing: synchronised where the layer still has its group."""
    cls = type(module)
    origin = _plain(classes.bottom(cls))
    if GROUP_KEY in module.__dict__:
        mixin = families.sync_mixin(origin)
        assert mixin is not None  # noqa: S101 (it was synchronised before)
        origin = classes.derive(mixin, origin)
    return classes.rebase(cls, origin)


def _require_grad(module: nn.Module, flags: Mapping[str, bool]) -> Edit:
    """Return the edit that sets the `requires_grad` of weight and bias."""

    def edit() -> Undo:
        parameters = affine_parameters(module)
        before = [(p, p.requires_grad, p.grad) for n, p in parameters.items() if n in flags]
        for name, required in flags.items():
            if name in parameters:
                parameters[name].requires_grad_(required)
                if not required:
                    parameters[name].grad = None

        def undo() -> None:
            for parameter, required, grad in before:
                parameter.requires_grad_(required)
                parameter.grad = grad

        return undo

    return edit
