"""Sharded checkpoints: an index file that says which shard holds which tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import metadata
from bnconvert.checkpoint.names import listed
from bnconvert.checkpoint.probe import Probe, inside
from bnconvert.checkpoint.record import Weights
from bnconvert.checkpoint.registry import Format, Options
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_INDEX = 200_000_000


def is_index(probe: Probe) -> bool:
    """Return whether a file is a JSON index of shards."""
    return (
        probe.file is not None
        and probe.path.name.endswith(".index.json")
        and probe.head.lstrip()[:1] == b"{"
    )


def read_index(probe: Probe, read_shard: Callable[[Path], Weights]) -> Weights:
    """Return the tensors of all shards, after comparing the shards with the index.

    Args:
        probe: The index file.
        read_shard: Reads one shard.

    Raises:
        CheckpointError: The index is damaged, leads out of its folder, or says other than the
            shards do.
    """
    index = _parse(probe)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(f"{probe.path}: has no weight_map; it is no index of shards")
    folder = probe.path.parent
    result = Weights(layout="sharded", files=[probe.source])
    shards = {name: read_shard(inside(folder, name)) for name in dict.fromkeys(places.values())}
    kinds = dict.fromkeys(shard.format for shard in shards.values())
    result.format = f"sharded {', '.join(kinds)}"
    for shard in shards.values():
        result.files += shard.files
        result.notes += [note for note in shard.notes if note not in result.notes]
        metadata.merge(result, shard)
    for name, shard_name in places.items():
        tensor = shards[shard_name].tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{probe.path}: says that {name} is in {shard_name}, which does not hold it; a "
                "shard is of another checkpoint"
            )
        result.tensors[name] = tensor
    for shard_name, shard in shards.items():
        own = [name for name in shard.tensors if name not in shard.shared]
        extra = [name for name in own if places.get(name) != shard_name]
        if extra:
            raise CheckpointError(
                f"{probe.path}: {shard_name} holds {listed(extra)}, which the index does not place "
                "there; a shard is of another checkpoint"
            )
        result.tensors.update(shard.tensors)
    return result


def _parse(probe: Probe) -> dict[str, Any]:
    if probe.source.size > MAX_INDEX:
        raise CheckpointError(f"{probe.path}: is larger than any index of shards")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"{probe.path}: names a tensor twice; it is damaged")
        return found

    try:
        text = probe.source.read(0, probe.source.size).decode("utf-8")
        index = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{probe.path}: is not JSON; it is damaged") from error
    if not isinstance(index, dict):
        raise CheckpointError(f"{probe.path}: is not an index of shards")
    return index


def _read(found: Probe, options: Options) -> Weights:
    return read_index(found, options.read)


FORMAT = Format("sharded", is_index, _read)
