"""Writing torch zip files tensor by tensor, as `torch.save` of a state dict would."""

from __future__ import annotations

import collections
import io
import json
import math
import pickle
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import metadata, torch_zip
from bnconvert.checkpoint.copying import chunks_of, new_file
from bnconvert.checkpoint.outputs import Job, compare_written, without_aliases
from bnconvert.checkpoint.pickle_values import as_lazy
from bnconvert.checkpoint.source import SourceFile
from bnconvert.checkpoint.zip_writer import ZipWriter

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.checkpoint.tensors import LazyTensor

ROOT = "archive/"

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


class _Storage:
    """Stands for a storage in the pickle, which names it by a persistent id."""

    def __init__(self, key: str, tensor: LazyTensor) -> None:
        typed = _STORAGES.get(tensor.dtype)
        count = math.prod(tensor.shape)
        numel = count if typed else count * tensor.dtype.itemsize
        self.id = ("storage", typed or torch.UntypedStorage, key, "cpu", numel)


class _Tensor:
    """Pickles as torch's own call that builds a contiguous tensor from a storage."""

    def __init__(self, storage: _Storage, tensor: LazyTensor) -> None:
        self.storage = storage
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        shape, dtype = self.tensor.shape, self.tensor.dtype
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        hooks: dict[Any, Any] = collections.OrderedDict()
        args = (self.storage, 0, shape, stride, False, hooks)
        if dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.id if isinstance(value, _Storage) else None


def write(path: Path, job: Job) -> None:
    """Write a torch zip file; `path` is a temporary one that the caller moves.

    Raises:
        VerificationError: The file read back differs.
    """
    stored, shared = without_aliases(job.weights.tensors)
    with new_file(path, checked=True) as output:
        archive = ZipWriter(output)
        _add(archive, "data.pkl", _pickle(stored, shared, job))
        _add(archive, "byteorder", b"little")
        for key, tensor in enumerate(stored.values()):
            archive.add(f"{ROOT}data/{key}", tensor.nbytes, chunks_of(tensor))
            job.progress(tensor.nbytes)
        sha256 = job.sha256.result() if job.sha256 else ""
        notes = metadata.write(job.weights, {}, job.provenance_with(sha256))
        _add(archive, metadata.ZIP_MEMBER, json.dumps(notes).encode())
        _add(archive, "version", b"3\n")
        archive.close()
    if job.verify:
        tree, _ = torch_zip.read_pickle(SourceFile(path).extent())
        written = {name: as_lazy(value) for name, value in tree.items()}
        compare_written(path, job.weights.tensors, {n: t for n, t in written.items() if t})


def _add(archive: ZipWriter, name: str, data: bytes) -> None:
    archive.add(ROOT + name, len(data), [memoryview(data)])


def _pickle(stored: dict[str, LazyTensor], shared: dict[str, str], job: Job) -> bytes:
    built = {
        name: _Tensor(_Storage(str(key), tensor), tensor)
        for key, (name, tensor) in enumerate(stored.items())
    }
    state: dict[str, _Tensor] = collections.OrderedDict()
    for name in job.weights.tensors:
        state[name] = built[shared.get(name, name)]
    if job.weights.versions:
        state._metadata = collections.OrderedDict(job.weights.versions)  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    return buffer.getvalue()
