"""Fit a checkpoint to a model: which prefix, whose names, and what does not fit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import names
from bnconvert.checkpoint.axes import order_axes
from bnconvert.checkpoint.epsilon import match_eps
from bnconvert.checkpoint.tensors import from_tensor
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from bnconvert.checkpoint.record import Checkpoint, Weights

Shapes = dict[str, tuple[int, ...]]


def match_checkpoint(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """Return the checkpoint's tensors under the model's names, ready for `load_state_dict`.

    Tried in turn, and taken only if every tensor of the model is there with its shape and none is
    left over: the names without the prefix that fits most of them (`model.`, `backbone.`), then
    timm's own renaming for the model's architecture, then the order of the tensors, where all
    shapes and BatchNorm roles agree one by one. A missing `num_batches_tracked` is 0, and axes are
    put into torch's order.

    Args:
        checkpoint: From `load_checkpoint`.
        model: The target; it is not changed.

    Raises:
        CheckpointError: The checkpoint is of another architecture; says how many names are
            missing, left over or of another shape, and the first of them. Or its eps differs from
            the model's, or it has different values for what the model shares.
    """
    weights = checkpoint.weights()
    order_axes(weights, {})
    fit(checkpoint.path, weights, model)
    match_eps(checkpoint.path, weights, model, None)
    counter = torch.zeros((), dtype=torch.int64)
    tensors = {
        name: weights.tensors[name].load() if name in weights.tensors else counter.clone()
        for name in model.state_dict()
    }
    _check_shared(checkpoint.path, tensors, model)
    return tensors


def _check_shared(path: Path, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Refuse different values for one tensor of the model: it would keep those loaded last."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        other = first.setdefault(id(tensor), name)
        if other != name and not _same_values(tensors[other], tensors[name]):
            raise CheckpointError(
                f"{path}: does not fit the model: {other} and {name} are one tensor there and have "
                "different values here; build the model without sharing them"
            )


def _same_values(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        one, other = one.double(), other.double()
    bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def fit(path: Path, weights: Weights, model: nn.Module) -> None:
    """Give tensors, facts and versions the model's names; see `match_checkpoint`.

    Args:
        path: For the message.
        weights: Changed in place.
        model: The target; it is not changed.

    Raises:
        CheckpointError: The tensors do not fit.
    """
    target = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    stored = {name: tensor.shape for name, tensor in weights.tensors.items()}
    renames = best_prefix(stored, target)
    problem = mismatch({new: stored[old] for old, new in renames.items()}, target)
    if problem:
        remapped = _timm_renamed(weights, model)
        shapes = {name: tuple(value.shape) for name, value in (remapped or {}).items()}
        if remapped and not mismatch(shapes, target):
            weights.tensors = {name: from_tensor(value) for name, value in remapped.items()}
            weights.notes.append("names changed by timm's checkpoint_filter_fn")
            return
        renames = by_order(stored, target)
        if not renames:
            raise CheckpointError(f"{path}: does not fit the model: {problem}")
        weights.notes.append("names given by the order of the tensors; all shapes agree")
    dropped = len(stored) - len(renames)
    if dropped:
        weights.notes.append(f"{dropped} tensors outside the model's prefix were left out")
    _rename(weights, renames)


def _rename(weights: Weights, renames: dict[str, str]) -> None:
    layers = {names.layer_of(old)[0]: names.layer_of(new)[0] for old, new in renames.items()}
    changed = sum(old != new for old, new in renames.items())
    if changed:
        old, new = next(pair for pair in renames.items() if pair[0] != pair[1])
        weights.notes.append(f"{changed} names changed to the model's, such as {old} to {new}")
    weights.tensors = {new: weights.tensors[old] for old, new in renames.items()}
    weights.bn = {layers[old]: facts for old, facts in weights.bn.items() if old in layers}
    weights.versions = {
        layers[old]: entry for old, entry in weights.versions.items() if old in layers
    }


def best_prefix(stored: Shapes, target: Shapes) -> dict[str, str]:
    """Return new names, without the prefix or with the one that makes most tensors fit.

    Args:
        stored: Shapes in the checkpoint.
        target: Shapes in the model.
    """
    candidates: dict[tuple[str, str], int] = {}
    for name, shape in stored.items():
        for prefix in names.parents(name):
            if target.get(name.removeprefix(prefix)) == shape:
                candidates[prefix, ""] = candidates.get((prefix, ""), 0) + 1
    for name, shape in target.items():
        for prefix in names.parents(name)[1:]:
            if stored.get(name.removeprefix(prefix)) == shape:
                candidates["", prefix] = candidates.get(("", prefix), 0) + 1
    if not candidates:
        return {name: name for name in stored}
    removed, added = min(candidates, key=lambda pair: (-candidates[pair], len("".join(pair))))
    kept = [name for name in stored if name.startswith(removed)]
    return {name: added + name.removeprefix(removed) for name in kept}


def mismatch(shapes: Shapes, target: Shapes) -> str:
    """Return what keeps tensors from fitting a model, or "" if they fit."""
    missing = [
        name for name in target if name not in shapes and not name.endswith("num_batches_tracked")
    ]
    extra = [name for name in shapes if name not in target]
    other = [name for name in shapes if name in target and shapes[name] != target[name]]
    parts = []
    if missing:
        parts.append(
            f"{len(missing)} tensors of the model are missing ({names.listed(missing, 3)})"
        )
    if extra:
        parts.append(f"{len(extra)} are not in the model ({names.listed(extra, 3)})")
    if other:
        first = other[0]
        parts.append(
            f"{len(other)} have another shape ({first}: {list(shapes[first])} for "
            f"{list(target[first])})"
        )
    return "; ".join(parts)


def by_order(stored: Shapes, target: Shapes) -> dict[str, str]:
    """Return new names by position, or nothing unless shapes and roles agree one by one."""

    def kept(shapes: Shapes) -> list[str]:
        return [name for name in shapes if not name.endswith("num_batches_tracked")]

    def role(name: str) -> str:
        leaf = names.layer_of(name)[1]
        return leaf if leaf in names.LEAVES else ""

    pairs = list(zip(kept(stored), kept(target), strict=False))
    same = len(kept(stored)) == len(kept(target)) and all(
        stored[old] == target[new] and role(old) == role(new) for old, new in pairs
    )
    if not same or not pairs:
        return {}
    layers = {names.layer_of(new)[0]: names.layer_of(old)[0] for old, new in pairs}
    counters = [
        (f"{layers[layer]}.{leaf}".lstrip("."), name)
        for name in target
        for layer, leaf in [names.layer_of(name)]
        if leaf == "num_batches_tracked" and layer in layers
    ]
    pairs += [(old, new) for old, new in counters if old in stored]
    return dict(pairs)


def _timm_renamed(weights: Weights, model: nn.Module) -> Mapping[str, Tensor] | None:
    """Return the tensors renamed by timm's `checkpoint_filter_fn` of the model, if it has one."""
    module = sys.modules.get(type(model).__module__)
    if not type(model).__module__.startswith("timm."):
        return None
    rename: Callable[..., Any] | None = getattr(module, "checkpoint_filter_fn", None)
    if rename is None:
        return None
    try:
        result = rename({name: t.load() for name, t in weights.tensors.items()}, model)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError):
        return None
    tensors = isinstance(result, dict) and all(isinstance(v, torch.Tensor) for v in result.values())
    return result if tensors else None
