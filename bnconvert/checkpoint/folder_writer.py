"""Writing folders: shards with their index, and model folders in timm's Hugging Face layout."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import metadata, safetensors_writer
from bnconvert.checkpoint.outputs import Job, compare_written, without_aliases
from bnconvert.checkpoint.safetensors_file import read_header
from bnconvert.checkpoint.source import SourceFile
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.checkpoint.tensors import LazyTensor

SHARD_SIZE = 5_000_000_000
INDEX = "model.safetensors.index.json"


def write_sharded(folder: Path, job: Job, shard_size: int = SHARD_SIZE) -> None:
    """Write shards into an empty folder, and the index after them.

    Args:
        folder: A temporary folder that the caller renames.
        job: What to write.
        shard_size: Bytes of tensors that a shard holds at most, unless one tensor is larger.
    """
    stored, shared = without_aliases(job.weights.tensors)
    shards = split(stored, shard_size)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        part = {name: stored[name] for name in names}
        aliases = {name: kept for name, kept in shared.items() if kept in part}
        last = number == len(shards)
        weights = dataclasses.replace(
            job.weights,
            bn={k: v for k, v in job.weights.bn.items() if _owns(k, part) or last},
            versions=job.weights.versions if last else {},
        )
        own = dataclasses.replace(job, weights=weights, sha256=job.sha256 if last else None)
        safetensors_writer.write_tensors(folder / file, part, aliases, own)
        if job.verify:
            compare_written(folder / file, part, read_header(SourceFile(folder / file))[0])
        places.update(dict.fromkeys(names, file))
    order = {name: places[name] for name in job.weights.tensors if name in places}
    total = sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": order}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _owns(layer: str, part: dict[str, LazyTensor]) -> bool:
    return any(name.startswith(f"{layer}.") for name in part)


def split(tensors: dict[str, LazyTensor], shard_size: int) -> list[list[str]]:
    """Return the names of each shard, in order; at least one shard."""
    if shard_size <= 0:
        raise CheckpointError(f"a shard of {shard_size} bytes holds nothing; give a larger size")
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if used + tensor.nbytes > shard_size and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += tensor.nbytes
    return shards


def write_model_folder(folder: Path, job: Job, config: dict[str, Any] | None = None) -> None:
    """Write `model.safetensors` and `config.json`, as timm's `local-dir:` loads them.

    Args:
        folder: A temporary folder that the caller renames.
        job: What to write.
        config: The model's configuration; without one, the architecture in the checkpoint.

    Raises:
        CheckpointError: The architecture is not known.
    """
    config = config or {"architecture": job.weights.architecture}
    if not config.get("architecture"):
        raise CheckpointError(
            "a model folder names its architecture, which this checkpoint does not; give --model"
        )
    safetensors_writer.write(folder / metadata.MODEL_FILE, job)
    text = json.dumps(config, indent=2) + "\n"
    (folder / metadata.CONFIG_FILE).write_text(text, encoding="utf-8")
