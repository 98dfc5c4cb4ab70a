"""Making every BatchNorm of a model synchronised, and plain again.

Both passes change the class of the layers and nothing else; see `bnconvert.layers.classes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import nn

from bnconvert.errors import BnconvertError, UnknownLayerError
from bnconvert.layers import Kind, classes, families
from bnconvert.layers.group import GROUP_KEY, GroupRef, check_group, group_of
from bnconvert.layers.kinds import why_unknown
from bnconvert.layers.subgroups import check_group_size, consecutive_group
from bnconvert.layers.swap import swap_class
from bnconvert.layers.sync import SyncMixin
from bnconvert.plan import Edit, Plan, without_collection
from bnconvert.report import LayerReport, Outcome, Report
from bnconvert.revert import plan_revert_sync_batchnorm, revert_sync_batchnorm
from bnconvert.selection import Patterns, Selection
from bnconvert.walk import Norm, find_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    Attributes = Callable[[], Mapping[str, Any]]

__all__ = [
    "convert_sync_batchnorm",
    "plan_convert_sync_batchnorm",
    "plan_revert_sync_batchnorm",
    "revert_sync_batchnorm",
]

ModelT = TypeVar("ModelT", bound=nn.Module)

_WHY_LEFT = {
    Kind.FROZEN: "its statistics are frozen; unfreeze_batchnorm first",
    Kind.FOREIGN_FROZEN: "{type} is frozen: it uses stored statistics only",
    Kind.IN_PLACE: "{type} normalizes and activates in place, which a BatchNorm class cannot do",
    Kind.LAZY: "{type} has no channels yet; run a batch through the model first",
    Kind.SCRIPTED: "it is scripted, and its code is fixed; convert before torch.jit.script",
    Kind.EXPORTED: "it is an exported graph, and its code is fixed; convert before export",
}


def convert_sync_batchnorm(
    model: ModelT,
    process_group: ProcessGroup | None = None,
    *,
    group_size: int | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    on_unknown: Literal["raise", "skip"] = "raise",
) -> ModelT:
    """Make the BatchNorm layers of a model take their statistics over all ranks, in place.

    A layer keeps its identity, parameters, buffers, hooks and flags; only its class changes, to one
    that is still an instance of the class from before. Converting twice changes nothing.

    Args:
        model: Any module; a BatchNorm itself is converted too.
        process_group: Ranks to take statistics over; None is the default group, and leaves a layer
            that is converted already in the group that it has.
        group_size: Take statistics over this many consecutive ranks instead; a collective call.
        include: Convert only these layers: fnmatch patterns on qualified names, or a function
            `(name, module) -> bool`.
        exclude: Leave these layers, likewise.
        on_unknown: What to do about layers that look like BatchNorm and run other code: "raise"
            names them all and changes nothing, "skip" leaves and reports them.

    Returns:
        The same model.

    Raises:
        UnknownLayerError: There are unknown layers and `on_unknown` is "raise".
        BnconvertError: `include` matches no layer, the group does not contain this rank, or
            `group_size` does not divide the number of ranks; nothing was changed.
    """
    return plan_convert_sync_batchnorm(
        model,
        process_group,
        group_size=group_size,
        include=include,
        exclude=exclude,
        on_unknown=on_unknown,
    ).apply()


@without_collection()
def plan_convert_sync_batchnorm(
    model: ModelT,
    process_group: ProcessGroup | None = None,
    *,
    group_size: int | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    on_unknown: Literal["raise", "skip"] = "raise",
) -> Plan[ModelT]:
    """Plan `convert_sync_batchnorm`, which has the same arguments and errors; changes nothing."""
    if on_unknown not in ("raise", "skip"):
        raise BnconvertError(f"on_unknown: expected 'raise' or 'skip', got {on_unknown!r}")
    target = _Target(process_group, group_size)
    selection = Selection(include, exclude)
    layers: list[LayerReport] = []
    edits: list[Edit] = []
    unknown: list[Norm] = []
    norms = find_norms(model)
    selection.refuse_idle(norms)
    for norm in norms:
        entries, edit = _plan_layer(norm, selection, target)
        if norm.kind is Kind.UNKNOWN and not selection.why_not(norm):
            unknown.append(norm)
        layers += entries
        edits += [edit] if edit else []
    if unknown and on_unknown == "raise":
        advice = 'exclude them, or leave them with on_unknown="skip"'
        raise UnknownLayerError(describe_unknown(unknown, advice))
    return Plan(model, Report("convert", tuple(layers)), edits)


class _Target:
    """The group that layers are converted to; a new group is made when a plan is applied."""

    def __init__(self, process_group: ProcessGroup | None, group_size: int | None) -> None:
        if process_group is not None and group_size is not None:
            raise BnconvertError("group_size: cannot be combined with process_group; give one")
        check_group(process_group)
        if group_size is not None:
            check_group_size(group_size)
        self._process_group = process_group
        self._group_size = group_size

    @property
    def given(self) -> bool:
        return self._process_group is not None or self._group_size is not None

    def attributes(self) -> dict[str, GroupRef]:
        group = self._process_group
        if self._group_size is not None:
            group = consecutive_group(self._group_size)
        return {GROUP_KEY: GroupRef(group)}

    def describe(self) -> str:
        if self._group_size is not None:
            return f"groups of {self._group_size} ranks"
        return GroupRef(self._process_group).describe()

    def is_group_of(self, module: SyncMixin) -> bool:
        return self._process_group is not None and group_of(module) is self._process_group


def _plan_layer(
    norm: Norm, selection: Selection, target: _Target
) -> tuple[list[LayerReport], Edit | None]:
    module, cls = norm.module, type(norm.module)
    reason = selection.why_not(norm) or _why_left(norm)
    if not reason and isinstance(module, SyncMixin):
        current: GroupRef = module._bnconvert_group
        if not target.given or target.is_group_of(module):
            reason = f"it is synchronised already ({current.describe()})"
    if reason:
        return norm.entries(Outcome.LEFT, reason=reason), None
    new = cls if norm.kind is Kind.SYNC else _sync_class(cls)
    now = f"{new.__name__} ({target.describe()})"
    edit = swap_class(module, norm.name, new, add=target.attributes)
    return norm.entries(Outcome.CONVERTED, now=now), edit


def _sync_class(cls: type[nn.Module]) -> type[nn.Module]:
    bottom = classes.bottom(cls)
    mixin = families.sync_mixin(bottom)
    assert mixin is not None  # noqa: S101 (plain kinds have one)
    return classes.rebase(cls, classes.derive(mixin, bottom))


def _why_left(norm: Norm) -> str:
    name = type(norm.module).__name__
    if norm.kind is Kind.UNKNOWN:
        return f"{why_unknown(norm.module)}, so what it computes is unknown"
    if norm.kind is Kind.FOREIGN_SYNC:
        return f"it is synchronised already, by {name}; revert_sync_batchnorm makes it plain"
    return _WHY_LEFT.get(norm.kind, "").format(type=name)


def describe_unknown(unknown: list[Norm], advice: str) -> str:
    """Return the error's text for layers that look like BatchNorm and run other code."""
    listed = "; ".join(
        f"{norm.name or 'the model'}: {why_unknown(norm.module)}" for norm in unknown
    )
    return f"{len(unknown)} unknown BatchNorm-like layers ({listed}); {advice}"
