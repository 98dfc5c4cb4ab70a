"""Writing safetensors files tensor by tensor."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from bnconvert.checkpoint import metadata
from bnconvert.checkpoint.copying import new_file, write_tensor
from bnconvert.checkpoint.outputs import NO_HASH, Job, compare_written, without_aliases
from bnconvert.checkpoint.safetensors_file import DTYPES, read_header
from bnconvert.checkpoint.source import SourceFile
from bnconvert.checkpoint.tensors import LazyTensor, dtype_name
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def write(path: Path, job: Job) -> None:
    """Write a safetensors file; `path` is a temporary one that the caller moves.

    Raises:
        CheckpointError: A tensor has a dtype that the format has not.
        VerificationError: The file read back differs.
    """
    tensors, shared = without_aliases(job.weights.tensors)
    write_tensors(path, tensors, shared, job)
    if job.verify:
        written, _ = read_header(SourceFile(path))
        compare_written(path, tensors, written)


def write_tensors(
    path: Path, tensors: Mapping[str, LazyTensor], shared: dict[str, str], job: Job
) -> None:
    """Write some of the job's tensors.

    Args:
        path: The file.
        tensors: What it holds.
        shared: Names that are the same memory as one of `tensors`.
        job: Provenance and settings.
    """
    placed = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # keeps all aligned
    texts = metadata.write(job.weights, shared, job.provenance_with(NO_HASH))
    with new_file(path, checked=job.verify) as output:
        output.write(memoryview(header(tensors, placed, texts)))
        for name in placed:
            write_tensor(output, tensors[name])
            job.progress(tensors[name].nbytes)
        if job.sha256 is not None:
            told = metadata.write(job.weights, shared, job.provenance_with(job.sha256.result()))
            os.pwrite(output.descriptor, header(tensors, placed, told), 0)


def header(tensors: Mapping[str, LazyTensor], placed: list[str], texts: Mapping[str, str]) -> bytes:
    """Return the file's beginning: the length of the header, and the header.

    Args:
        tensors: In the order in which the header names them.
        placed: Their names in the order of the bytes.
        texts: Metadata.
    """
    offsets, position = {}, 0
    for name in placed:
        offsets[name] = [position, position + tensors[name].nbytes]
        position += tensors[name].nbytes
    entries: dict[str, object] = {"__metadata__": dict(texts)}
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise CheckpointError(
                f"{name}: safetensors has no type for {dtype_name(tensor.dtype)}; write a .pth"
            )
        if name == "__metadata__":
            raise CheckpointError("a tensor is named '__metadata__', which safetensors keeps")
        entries[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets[name],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
