"""What bnconvert keeps in the text metadata of safetensors files, so that a copy loses nothing.

safetensors has only tensors and text. Facts about BatchNorm layers, names of shared tensors,
torch's state-dict versions, the architecture and the provenance are kept as JSON under
`bnconvert.` keys.
"""

from __future__ import annotations

import json
from typing import Any

from bnconvert.checkpoint.record import Fact, Weights

PREFIX = "bnconvert."


def write(weights: Weights, shared: dict[str, str], provenance: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of a file.

    Args:
        weights: What is written.
        shared: Names that are the same memory as another name, which is written.
        provenance: Source, hash and changes.
    """
    facts = {
        layer: {key: [fact.value, fact.source] for key, fact in values.items()}
        for layer, values in weights.bn.items()
    }
    parts = {
        "batchnorm": facts,
        "shared": shared,
        "versions": weights.versions,
        "architecture": weights.architecture,
        "provenance": provenance,
    }
    packed = {PREFIX + key: json.dumps(value) for key, value in parts.items() if value}
    return {"format": "pt", **packed}


def read(weights: Weights, metadata: dict[str, str]) -> None:
    """Restore into `weights` what `write` kept; anything else in the metadata is left alone."""
    for layer, values in _dictionary(metadata, "batchnorm").items():
        if not isinstance(values, dict):
            continue
        pairs = {key: pair for key, pair in values.items() if _is_fact(pair)}
        weights.bn[layer] = {key: Fact(value, source) for key, (value, source) in pairs.items()}
    versions = _dictionary(metadata, "versions")
    weights.versions = {name: entry for name, entry in versions.items() if isinstance(entry, dict)}
    architecture = _value(metadata, "architecture")
    weights.architecture = architecture if isinstance(architecture, str) else ""
    shared = _dictionary(metadata, "shared")
    for name, kept in shared.items():
        if kept in weights.tensors and name not in weights.tensors:
            weights.tensors[name] = weights.tensors[kept]
    if shared:
        weights.notes.append(f"{len(shared)} names restored that share memory with another")


def merge(into: Weights, shard: Weights) -> None:
    """Add what one shard's metadata said."""
    into.bn.update(shard.bn)
    into.versions.update(shard.versions)
    into.architecture = into.architecture or shard.architecture


def _is_fact(pair: Any) -> bool:
    plain = (bool, int, float, str, type(None))
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], plain)
        and isinstance(pair[1], str)
    )


def _value(metadata: dict[str, str], key: str) -> Any:
    try:
        return json.loads(metadata.get(PREFIX + key, "null"))
    except (ValueError, RecursionError):
        return None


def _dictionary(metadata: dict[str, str], key: str) -> dict[str, Any]:
    value = _value(metadata, key)
    return value if isinstance(value, dict) else {}
