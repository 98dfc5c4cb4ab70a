"""`save_checkpoint`, and the choice of writer that conversion shares with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import folder_writer, safetensors_writer, torch_writer
from bnconvert.checkpoint.outputs import Job
from bnconvert.checkpoint.record import Checkpoint, Weights
from bnconvert.checkpoint.tensors import LazyTensor, from_tensor
from bnconvert.checkpoint.writing import atomic_file, atomic_folder, check_folder, check_target
from bnconvert.errors import BnconvertError, CheckpointError

if TYPE_CHECKING:
    import os

    from torch import Tensor

KINDS = ("safetensors", "torch", "sharded", "folder")
_SUFFIXES = {".safetensors": "safetensors", ".pth": "torch", ".pt": "torch", ".bin": "torch"}


def save_checkpoint(
    checkpoint: Checkpoint | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> None:
    """Write weights exactly as they are; `convert_checkpoint` is the one that mends.

    Tensors that are one memory are written once and come back as one. The file is written beside
    its place, read back and compared, and moved.

    Args:
        checkpoint: From `load_checkpoint`, or a state dict.
        path: The file or new folder.
        to: "safetensors", "torch", "sharded" or "folder"; by default the suffix decides.
        max_shard_size: Bytes of a shard; makes the default "sharded".
        overwrite: Replace an existing file.
        verify: Read the result back and compare it.

    Raises:
        CheckpointError: The output exists, or cannot hold a tensor.
        VerificationError: The result read back differs; nothing was left.
    """
    weights = _weights(checkpoint)
    write(Job(weights, verify=verify), Path(path), to, max_shard_size, overwrite)


def _weights(checkpoint: Checkpoint | Mapping[str, Tensor]) -> Weights:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.weights()
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"a {type(checkpoint).__name__} is no checkpoint or state dict")
    tensors: dict[str, LazyTensor] = {}
    for name, value in checkpoint.items():
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not plain or value.is_quantized or value.device.type == "meta":
            raise CheckpointError(f"{name}: is not a plain tensor; leave it out of the state dict")
        tensors[str(name)] = from_tensor(value)
    versions = getattr(checkpoint, "_metadata", None)
    return Weights(tensors, versions=dict(versions) if isinstance(versions, Mapping) else {})


def kind_of(path: Path, to: str | None, max_shard_size: int | None) -> str:
    """Return which of `KINDS` to write.

    Raises:
        CheckpointError: `to` is unknown, or neither it nor the suffix says.
    """
    kind = to or _SUFFIXES.get(path.suffix) or ("sharded" if not path.suffix else None)
    if kind not in KINDS:
        what = f"--to {to} is unknown" if to else f"the suffix {path.suffix!r} names no format"
        raise CheckpointError(f"{path}: {what}; choose --to {', '.join(KINDS)}")
    if max_shard_size is not None and kind != "sharded":
        raise CheckpointError(
            f"{path}: a shard size is given but the output is {kind}; use --to sharded"
        )
    return kind


def check_output(path: Path, kind: str, overwrite: bool, sources: Weights) -> None:
    """Refuse an output that exists, or that is one of the inputs, also by a link."""
    if path.exists():
        same = [file.path for file in sources.files if path.samefile(file.path)]
        if same:
            raise CheckpointError(f"{path}: is the input itself; name another output")
    if kind in ("sharded", "folder"):
        check_folder(path)
    else:
        check_target(path, overwrite)


def write(
    job: Job,
    path: Path,
    to: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    config: dict[str, Any] | None = None,
) -> None:
    """Write a job to its place, whole or not at all.

    Raises:
        CheckpointError: As for `save_checkpoint`; also for a full disk or another write error.
    """
    kind = kind_of(path, to, max_shard_size)
    check_output(path, kind, overwrite, job.weights)
    try:
        if kind == "sharded":
            with atomic_folder(path) as folder:
                folder_writer.write_sharded(folder, job, max_shard_size or folder_writer.SHARD_SIZE)
        elif kind == "folder":
            with atomic_folder(path) as folder:
                folder_writer.write_model_folder(folder, job, config)
        else:
            writer = safetensors_writer if kind == "safetensors" else torch_writer
            with atomic_file(path, overwrite=overwrite) as file:
                writer.write(file, job)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; nothing was written") from error
    except BnconvertError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
