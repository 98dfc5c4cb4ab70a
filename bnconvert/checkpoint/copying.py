"""Moving the bytes of one tensor into a file, and comparing them with another's."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from bnconvert.checkpoint.source import CHUNK
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from bnconvert.checkpoint.source import Extent
    from bnconvert.checkpoint.tensors import LazyTensor


class Output(Protocol):
    """A file that is written from its start to its end."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    def copy(self, extent: Extent) -> None:
        """Append a range of another file."""


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
    pairs = zip(chunks_of(first), chunks_of(second), strict=True)  # both in steps of CHUNK
    return all(np.array_equal(np.frombuffer(a, "u1"), np.frombuffer(b, "u1")) for a, b in pairs)


class FileOutput:
    """Writes a file descriptor, copying from other files inside the kernel where it can.

    Args:
        descriptor: Open for writing.
        checked: Read every copied byte, so that checksums of the source are compared.
    """

    def __init__(self, descriptor: int, checked: bool) -> None:
        self.descriptor = descriptor
        self.checked = checked

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        while data.nbytes:
            data = data[os.write(self.descriptor, data) :]

    def copy(self, extent: Extent) -> None:
        """Append a range of another file."""
        if self.checked or not hasattr(os, "sendfile"):
            for chunk in extent.chunks():
                self.write(chunk)
            return
        with extent.file.open() as stream:
            position, left = extent.offset, extent.nbytes
            while left:
                count = os.sendfile(self.descriptor, stream.fileno(), position, left)
                if not count:
                    raise CheckpointError(f"{extent.file.path}: ends early; it was cut")
                position, left = position + count, left - count


def write_tensor(output: Output, tensor: LazyTensor) -> None:
    """Append the bytes of a stored tensor to a file."""
    if tensor.extent is not None:
        output.copy(tensor.extent)
        return
    for chunk in chunks_of(tensor):
        output.write(chunk)
