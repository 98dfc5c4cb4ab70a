"""State dicts of whole pickled modules, taken from inert descriptions of their objects."""

from __future__ import annotations

from typing import Any

from bnconvert.checkpoint.pickle_values import Instance, as_lazy
from bnconvert.checkpoint.record import Fact, Facts, Weights
from bnconvert.errors import CheckpointError

MAX_MODULES = 20_000
MAX_DEPTH = 200

FACTS = ("eps", "momentum", "affine", "track_running_stats", "inplace_abn")


def holds_module(value: Any) -> bool:
    """Return whether a value is a pickled `nn.Module`."""
    if not isinstance(value, Instance):
        return False
    attributes = value.attributes()
    return isinstance(attributes.get("_modules"), dict) and "_parameters" in attributes


def module_weights(module: Instance) -> Weights:
    """Return what `module.state_dict()` would hold, and the facts of its norm layers.

    Args:
        module: A pickled module.

    Raises:
        CheckpointError: The module tree is endless, or a tensor has no values.
    """
    weights = Weights()
    pending: list[tuple[str, Instance, int]] = [("", module, 0)]
    for _ in range(MAX_MODULES):
        if not pending:
            return weights
        prefix, current, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise CheckpointError(f"modules are nested more than {MAX_DEPTH} deep; refused")
        attributes = current.attributes()
        _take_tensors(prefix, attributes, weights)
        facts = norm_facts(current.type, attributes, "pickled module")
        if facts:
            weights.bn[prefix.rstrip(".")] = facts
        children = attributes.get("_modules")
        for name, child in reversed(list((children or {}).items())):
            if isinstance(child, Instance):
                pending.append((f"{prefix}{name}.", child, depth + 1))
    raise CheckpointError(f"more than {MAX_MODULES} modules are reachable; refused")


def _take_tensors(prefix: str, attributes: dict[Any, Any], weights: Weights) -> None:
    hidden = attributes.get("_non_persistent_buffers_set")
    hidden = set(hidden) if isinstance(hidden, (set, frozenset, list)) else set()
    for group in ("_parameters", "_buffers"):
        members = attributes.get(group)
        for name, value in (members if isinstance(members, dict) else {}).items():
            if value is None or name in hidden or not isinstance(name, str):
                continue
            try:
                tensor = as_lazy(value)
            except CheckpointError as error:
                raise CheckpointError(f"{prefix}{name}: {error}") from error
            if tensor is not None:
                weights.tensors[prefix + name] = tensor


def norm_facts(type_name: str, attributes: dict[Any, Any], source: str) -> Facts:
    """Return eps, momentum and the like of a norm layer; empty for any other object.

    Args:
        type_name: Qualified class name.
        attributes: Attributes of the object.
        source: Where they come from.
    """
    short = type_name.rpartition(".")[2].lower()
    if "eps" not in attributes or not ("batchnorm" in short or "abn" in short):
        return {}
    facts: Facts = {"class": Fact(type_name, source)}
    for name in FACTS:
        value = attributes.get(name, Ellipsis)
        if value is None or isinstance(value, (bool, int, float)):
            facts[name] = Fact(value, source)
    return facts
