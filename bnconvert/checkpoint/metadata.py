"""What bnconvert keeps in the text metadata of safetensors files, so that a copy loses nothing.

safetensors has only tensors and text. Facts about BatchNorm layers, names of shared tensors,
torch's state-dict versions, the architecture and the provenance are kept as JSON under
`bnconvert.` keys.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.record import Fact, Weights

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.checkpoint.archive import Archive

PREFIX = "bnconvert."
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
ZIP_MEMBER = "bnconvert.json"


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


def read_member(weights: Weights, archive: Archive) -> None:
    """Restore what `torch_writer` put beside the pickle, which torch itself does not look at."""
    name = next(name for name in archive.names() if name.endswith(ZIP_MEMBER))
    try:
        texts = json.loads(archive.read(name, 1 << 26))
    except (ValueError, RecursionError):
        return
    if isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values()):
        versions = weights.versions
        read(weights, texts)
        weights.versions = versions


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
        if isinstance(kept, str) and kept in weights.tensors and name not in weights.tensors:
            both = replace(weights.tensors[kept], shares=("shared", kept, id(weights)))
            weights.tensors[name] = weights.tensors[kept] = both
            weights.shared[name] = kept
    if weights.shared:
        weights.notes.append(f"{len(weights.shared)} names restored that share another's memory")


def architecture_of(folder: Path) -> str:
    """Return the architecture that a model folder's `config.json` names, or ""."""
    config = folder / CONFIG_FILE
    if not config.is_file() or config.stat().st_size > 1 << 24:
        return ""
    try:
        value = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return ""
    name = value.get("architecture") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


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
