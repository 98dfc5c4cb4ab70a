"""Moving the bytes of one tensor into a file, and comparing them with another's."""

from __future__ import annotations

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from bnconvert.checkpoint.source import CHUNK
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from bnconvert.checkpoint.source import Extent, Joined
    from bnconvert.checkpoint.tensors import LazyTensor

FLUSH_EVERY = 1 << 26
"""Bytes after which what was written is brought to the disk."""

_flush = getattr(os, "fdatasync", os.fsync)


class Output(Protocol):
    """A file that is written from its start to its end."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    def copy(self, segment: Extent | Joined) -> None:
        """Append ranges of other files."""


def raw_bytes(values: Tensor) -> memoryview:
    """Return the row-major little-endian bytes of a tensor in memory."""
    flat = values.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    if sys.byteorder == "big" and values.dtype.itemsize > 1:
        width = values.dtype.itemsize // (2 if values.dtype.is_complex else 1)
        data = data.reshape(-1, width).flip(1).reshape(-1).contiguous()
    return memoryview(data.numpy().data)


def chunks_of(tensor: LazyTensor) -> Iterator[memoryview]:
    """Yield the row-major little-endian bytes of a stored tensor; valid until the next chunk."""
    if tensor.extent is not None:
        yield from tensor.extent.chunks()
        return
    values = tensor.load()
    if tuple(values.shape) != tensor.shape or values.dtype is not tensor.dtype:
        raise CheckpointError(f"was read as {list(values.shape)}, expected {list(tensor.shape)}")
    data = raw_bytes(values)
    for start in range(0, data.nbytes, CHUNK):
        yield data[start : start + CHUNK]


def same_bytes(first: LazyTensor, second: LazyTensor) -> bool:
    """Return whether two stored tensors have the same dtype, shape and bytes."""
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    left = right = memoryview(b"")
    others = chunks_of(second)
    for left in chunks_of(first):
        while left.nbytes:
            right = right if right.nbytes else next(others, right)
            count = min(left.nbytes, right.nbytes)
            if not count or not np.array_equal(
                np.frombuffer(left[:count], "u1"), np.frombuffer(right[:count], "u1")
            ):
                return False
            left, right = left[count:], right[count:]
    return not right.nbytes and next(others, None) is None


class FileOutput:
    """Writes a file descriptor, copying from other files inside the kernel where it can.

    What was written is brought to the disk while the rest is still being written: by the time the
    file is complete, little is left for the final flush to wait for.

    Args:
        descriptor: Open for writing.
        checked: Read every copied byte, so that checksums of the source are compared.
    """

    def __init__(self, descriptor: int, checked: bool) -> None:
        self.descriptor = descriptor
        self.checked = checked
        self._flusher = ThreadPoolExecutor(1)  # starts its thread when it is first used
        self._flushing: Future[None] | None = None
        self._unflushed = 0

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        while data.nbytes:
            count = os.write(self.descriptor, data)
            data = data[count:]
            self._written(count)

    def copy(self, segment: Extent | Joined) -> None:
        """Append ranges of other files."""
        if self.checked or not hasattr(os, "sendfile"):
            for chunk in segment.chunks():
                self.write(chunk)
            return
        for extent in segment.extents():
            self._send(extent)

    def _send(self, extent: Extent) -> None:
        with extent.file.open() as stream:
            position, left = extent.offset, extent.nbytes
            while left:
                size = min(left, FLUSH_EVERY)
                count = os.sendfile(self.descriptor, stream.fileno(), position, size)
                if not count:
                    raise CheckpointError(f"{extent.file.path}: ends early; it was cut")
                position, left = position + count, left - count
                self._written(count)

    def _written(self, count: int) -> None:
        self._unflushed += count
        if self._unflushed < FLUSH_EVERY or not (self._flushing is None or self._flushing.done()):
            return
        self._flushed()
        self._flushing = self._flusher.submit(_flush, self.descriptor)
        self._unflushed = 0

    def _flushed(self) -> None:
        """Wait for the last flush; an error of the disk is told once only, so it must not pass."""
        if self._flushing is not None:
            self._flushing.result()

    def close(self) -> None:
        """Wait for what is being flushed and close the descriptor.

        Raises:
            OSError: Flushing failed.
        """
        self._flusher.shutdown()
        os.close(self.descriptor)
        self._flushed()


@contextlib.contextmanager
def new_file(path: Path, checked: bool) -> Iterator[FileOutput]:
    """Make a file that must not exist and close it at the end; arguments as for `FileOutput`.

    Raises:
        OSError: It cannot be made or written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    output = FileOutput(os.open(path, flags, 0o600), checked)
    with contextlib.closing(output):
        yield output


def write_tensor(output: Output, tensor: LazyTensor) -> None:
    """Append the bytes of a stored tensor to a file."""
    if tensor.extent is not None:
        output.copy(tensor.extent)
        return
    for chunk in chunks_of(tensor):
        output.write(chunk)
