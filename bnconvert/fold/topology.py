"""The structure of a folded model, as plain data: saved with its weights, and rebuilt from it.

A folded model has layers that its architecture does not make: identities, clamps, biases. Folding
records its edits on the model; `describe_topology` returns them and `rebuild_topology` gives a
freshly built model the same structure, into which the folded state dict then loads strictly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.errors import BnconvertError
from bnconvert.fold.edits import (
    Bounds,
    ClampActivation,
    NotInPlace,
    RemoveNorm,
    Reparameterize,
    Separate,
    SetAffine,
    SetWeights,
    TreeEdit,
)
from bnconvert.fold.reparameterize import METHODS
from bnconvert.plan import Plan
from bnconvert.report import Report

if TYPE_CHECKING:
    from bnconvert.plan import Undo

_KEY = "_bnconvert_folds"
_VERSION = 1


def describe_topology(model: nn.Module) -> dict[str, Any]:
    """Return what folding changed about a model's structure, as plain types for JSON.

    Returns:
        An empty dict for a model that was not folded.
    """
    edits = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for edit in module.__dict__.get(_KEY, ()):
            own = {key: f"{prefix}{edit[key]}" for key in ("name", "like") if key in edit}
            edits.append({**edit, **own})
    return {"version": _VERSION, "edits": edits} if edits else {}


def rebuild_topology(model: nn.Module, topology: dict[str, Any]) -> None:
    """Give a model the structure of a folded one; its weights then have to be loaded.

    Args:
        model: A model of the same architecture, as built; changed in place.
        topology: What `describe_topology` returned for the folded model.

    Raises:
        BnconvertError: The description is of another version or does not fit the model, which is
            then as it was.
    """
    if not topology:
        return
    if topology.get("version") != _VERSION:
        raise BnconvertError(
            f"folded structure: version {topology.get('version')!r} is not {_VERSION}; "
            "load it with the bnconvert that wrote it"
        )
    edits = [_read(model, entry) for entry in topology["edits"]]
    plan = Plan(model, Report("rebuild"), [_applier(model, edit) for edit in edits])
    try:
        plan.apply()
    except (AttributeError, StopIteration, KeyError) as error:
        raise BnconvertError(
            f"folded structure: it does not fit the model: {error}; build the architecture that "
            "was folded"
        ) from error
    record(model, edits)


def record(root: nn.Module, edits: list[TreeEdit]) -> Undo:
    """Note on a model what was done to it, and return what takes the note back."""
    before = root.__dict__.get(_KEY)
    root.__dict__[_KEY] = [*(before or ()), *map(_entry, edits)]

    def undo() -> None:
        del root.__dict__[_KEY]
        if before is not None:
            root.__dict__[_KEY] = before

    return undo


def _applier(model: nn.Module, edit: TreeEdit) -> Any:
    return lambda: edit.apply(model)


def _entry(edit: TreeEdit) -> dict[str, Any]:
    entry: dict[str, Any] = {"edit": type(edit).__name__, "name": edit.name}
    if isinstance(edit, SetWeights):
        entry |= {"bias": None if edit.bias is None else len(edit.bias), "plain": edit.plain}
    elif isinstance(edit, Reparameterize):
        entry["method"] = edit.method
    elif isinstance(edit, SetAffine):
        entry["channels"] = len(edit.weight)
    elif isinstance(edit, ClampActivation):
        entry |= {"shape": list(edit.bounds.lower.shape), "like": edit.like}
    elif isinstance(edit, RemoveNorm) and edit.bounds is not None:
        entry["shape"] = list(edit.bounds.lower.shape)
    return entry


def _read(model: nn.Module, entry: dict[str, Any]) -> TreeEdit:
    kind, name = entry["edit"], entry["name"]
    if kind == "SetWeights":
        bias = None if entry["bias"] is None else _zeros([entry["bias"]])
        return SetWeights(name, None, bias, entry["plain"])
    if kind == "SetAffine":
        return SetAffine(name, _zeros([entry["channels"]]), _zeros([entry["channels"]]))
    if kind == "RemoveNorm":
        return RemoveNorm(name, _bounds(entry["shape"]) if "shape" in entry else None)
    if kind == "ClampActivation":
        return ClampActivation(name, _bounds(entry["shape"]), entry["like"])
    if kind == "Reparameterize" and entry["method"] in METHODS:
        return Reparameterize(name, entry["method"])
    if kind in {"NotInPlace", "Separate"}:
        return NotInPlace(name) if kind == "NotInPlace" else Separate(name)
    raise BnconvertError(
        f"folded structure: {name}: {kind!r} is no known edit; load it with the bnconvert that "
        "wrote it"
    )


def _zeros(shape: list[int]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _bounds(shape: list[int]) -> Bounds:
    return Bounds(_zeros(shape), _zeros(shape))
