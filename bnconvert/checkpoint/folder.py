"""Folders: which file in one holds the weights, decided by names that tools give and no guess."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from bnconvert.checkpoint import metadata
from bnconvert.checkpoint.names import listed
from bnconvert.checkpoint.probe import Probe, inside
from bnconvert.checkpoint.registry import Format, Options
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from bnconvert.checkpoint.record import Weights

NAMES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "pytorch_model.bin",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "model_best.pth.tar",
    "last.pth.tar",
)
"""What Hugging Face libraries and timm's training script call weights, the best first."""

_SUFFIXES = (
    ".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".h5", ".keras", ".hdf5", ".onnx",
    ".npz", ".msgpack", ".pkl",
)  # fmt: skip
_SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.(safetensors|bin)$")
_DEEPSPEED = re.compile(r"mp_rank_\d+_model_states\.pt$")
MAX_FILES = 100_000


def weights_in(folder: Path) -> tuple[Path, str]:
    """Return the file that holds a folder's weights, and a note on the choice.

    Args:
        folder: A model folder, training output, DeepSpeed or TensorFlow folder, or Hugging Face
            cache.

    Raises:
        CheckpointError: There is none, or several and no rule among them.
    """
    files = sorted(_listing(folder))
    for find in (_cache, _by_name, _deepspeed, _tensorflow, _shards, _only):
        found = find(folder, files)
        if found is not None:
            return found, f"{found.relative_to(folder)} was taken from the folder"
    if not files:
        raise CheckpointError(f"{folder}: is empty and holds no weights; name another folder")
    raise CheckpointError(
        f"{folder}: holds no weights that are known by their name; its files are {listed(files)}; "
        "name one of them"
    )


def _listing(folder: Path) -> list[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MAX_FILES:
                raise CheckpointError(f"{folder}: has more than {MAX_FILES} files; name one")
    return names


def _cache(folder: Path, files: list[str]) -> Path | None:
    """Follow a Hugging Face cache entry: `refs/main` names the folder under `snapshots`."""
    if not {"blobs", "snapshots"} <= set(files):
        return None
    reference = folder / "refs" / "main"
    snapshots = sorted(_listing(folder / "snapshots"))
    if reference.is_file():
        revision = reference.read_text(encoding="utf-8", errors="replace")[:100].strip()
    elif len(snapshots) == 1:
        revision = snapshots[0]
    else:
        raise CheckpointError(f"{folder}: has snapshots {listed(snapshots)}; name one of them")
    if revision not in snapshots:
        raise CheckpointError(f"{folder}: refers to snapshot {revision!r}, which is not there")
    return weights_in(folder / "snapshots" / revision)[0]


def _by_name(folder: Path, files: list[str]) -> Path | None:
    name = next((name for name in NAMES if name in files), None)
    if name is None:
        indexes = [name for name in files if name.endswith(".index.json")]
        name = indexes[0] if len(indexes) == 1 else None
    return inside(folder, name) if name else None


def _deepspeed(folder: Path, files: list[str]) -> Path | None:
    """Follow DeepSpeed's `latest`, or take the one file of model states."""
    if "latest" in files and (folder / "latest").is_file():
        step = (folder / "latest").read_text(encoding="utf-8", errors="replace")[:200].strip()
        inner = inside(folder, step)
        return _deepspeed(inner, sorted(_listing(inner))) if inner.is_dir() else None
    states = [name for name in files if _DEEPSPEED.match(name)]
    zero3 = [name for name in files if name.startswith("zero_pp_rank_") and "model_states" in name]
    if zero3 and not states:
        raise CheckpointError(
            f"{folder}: is a DeepSpeed ZeRO-3 checkpoint, whose weights are spread over the "
            "optimizer files; run its zero_to_fp32.py and name the result"
        )
    if len(states) > 1:
        raise CheckpointError(
            f"{folder}: holds the states of {len(states)} model-parallel ranks; merge them first"
        )
    return inside(folder, states[0]) if states else None


def _tensorflow(folder: Path, files: list[str]) -> Path | None:
    """Take a TensorFlow checkpoint: named by `checkpoint`, alone, or in a SavedModel."""
    if "variables" in files and "saved_model.pb" in files:
        return inside(folder, "variables/variables.index")
    named = None
    if "checkpoint" in files and (folder / "checkpoint").is_file():
        text = (folder / "checkpoint").read_text(encoding="utf-8", errors="replace")[:65536]
        match = re.search(r'^model_checkpoint_path: "([^"]*)"', text, re.MULTILINE)
        named = f"{Path(match.group(1)).name}.index" if match else None
    indexes = [name for name in files if name.endswith(".index")]
    chosen = named if named in indexes else indexes[0] if len(indexes) == 1 else None
    return inside(folder, chosen) if chosen else None


def _shards(folder: Path, files: list[str]) -> Path | None:
    """Refuse shards without their index: any one of them would look like a whole checkpoint."""
    shards = [name for name in files if _SHARD.match(name)]
    if shards:
        raise CheckpointError(
            f"{folder}: holds {len(shards)} shards but no index of them; the checkpoint is "
            "incomplete"
        )
    return None


def _only(folder: Path, files: list[str]) -> Path | None:
    weights = [name for name in files if name.endswith(_SUFFIXES) and not name.startswith(".")]
    if len(weights) > 1:
        raise CheckpointError(f"{folder}: holds several files of weights ({listed(weights)})")
    return inside(folder, weights[0]) if weights else None


def _read(found: Probe, options: Options) -> Weights:
    file, note = weights_in(found.path)
    weights = options.read(file)
    weights.notes.insert(0, note)
    weights.architecture = weights.architecture or metadata.architecture_of(file.parent)
    return weights


FORMAT = Format("folder", lambda found: found.is_folder, _read)
