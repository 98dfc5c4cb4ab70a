"""Names of tensors: what wrappers add to them, and taking that off. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Value = TypeVar("Value")

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which DDP, torch.compile, FSDP and activation checkpointing put a module."""

LEAVES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
"""What a BatchNorm layer keeps in a state dict."""


def without_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers add, anywhere and repeated.

    The last part names the tensor and stays, whatever it is called.
    """
    *parents, leaf = name.split(".")
    return ".".join([part for part in parents if part not in WRAPPERS] + [leaf])


def strip_wrappers(entries: Mapping[str, Value]) -> tuple[dict[str, Value], str]:
    """Return the entries under names without wrapper parts, and a note on what was done.

    Where two entries would come to have one name, nothing is renamed.
    """
    renamed = {name: without_wrappers(name) for name in entries}
    changed = sum(new != old for old, new in renamed.items())
    if not changed:
        return dict(entries), ""
    if len(set(renamed.values())) < len(renamed):
        return dict(entries), "wrapper names were kept: without them two tensors have one name"
    found = [part for part in WRAPPERS if any(part in n.split(".")[:-1] for n in entries)]
    dotted = ", ".join(f"{part}." for part in found)
    note = f"wrapper names removed from {changed} of {len(renamed)} tensors: {dotted}"
    return {renamed[name]: value for name, value in entries.items()}, note


def strip_prefix(entries: Mapping[str, Value], prefix: str) -> tuple[dict[str, Value], str]:
    """Return the entries with a literal prefix removed where they have it, and a note.

    Raises:
        CheckpointError: No entry has the prefix, or two would come to have one name.
    """
    count = sum(name.startswith(prefix) for name in entries)
    if not count:
        raise CheckpointError(
            f"no tensor name starts with {prefix!r}; the first are {listed(entries, 3)}"
        )
    result: dict[str, Value] = {}
    for name, value in entries.items():
        new = name.removeprefix(prefix)
        if new in result or not new:
            raise CheckpointError(f"removing the prefix {prefix!r} gives two tensors one name")
        result[new] = value
    return result, f"prefix {prefix!r} removed from {count} of {len(entries)} tensors"


def parents(name: str) -> list[str]:
    """Return the prefixes that a name has, shortest first: "a.b.c" has "", "a.", "a.b."."""
    parts = name.split(".")[:-1]
    return ["", *(".".join(parts[: depth + 1]) + "." for depth in range(len(parts)))]


def layer_of(name: str) -> tuple[str, str]:
    """Split a name into its layer and its leaf: "a.b.weight" is ("a.b", "weight")."""
    layer, _, leaf = name.rpartition(".")
    return layer, leaf


def batchnorm_layers(entries: Iterable[str]) -> list[str]:
    """Return the layers that have running statistics, in order."""
    split = (layer_of(name) for name in entries)
    return list(
        dict.fromkeys(layer for layer, leaf in split if leaf in ("running_mean", "running_var"))
    )


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Return "a, b and 7 more" for a message."""
    every = list(names)
    text = ", ".join(map(repr, every[:limit])) or "none"
    return text if len(every) <= limit else f"{text} and {len(every) - limit} more"
