"""Tensors that stay in their file until they are asked for."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bnconvert.checkpoint.source import Extent, Joined, Segment, read_bytes
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

MAX_EXPANDED = 1 << 24
"""Elements that a tensor may have beyond those of its storage (overlapping strides)."""


@dataclass(frozen=True)
class LazyTensor:
    """Shape and dtype of a stored tensor, and how to get its values.

    Attributes:
        shape: As stored.
        dtype: As stored.
        load: Reads the values; a new tensor on every call.
        extent: Where the values lie as row-major little-endian bytes, if they do.
        shares: Equal for tensors that are one and the same memory; None if not known.
        order: Meaning of the axes where it is not torch's, such as "HWIO"; "" otherwise.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    extent: Extent | Joined | None = None
    shares: Hashable = None
    order: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def ordered(self, order: str) -> LazyTensor:
        """Return the same tensor with its axes described."""
        return replace(self, order=order)


class LazyTensors(Mapping[str, "Tensor"]):
    """Names to tensors; each is read when it is asked for, and no other with it."""

    def __init__(self, entries: Mapping[str, LazyTensor]) -> None:
        self.entries = dict(entries)

    def __getitem__(self, name: str) -> Tensor:
        return self.entries[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def from_tensor(tensor: Tensor) -> LazyTensor:
    """Describe a tensor in memory; two that are the same memory and geometry share."""
    shares: Hashable = None
    if tensor.numel() and tensor.device.type != "meta":
        place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        shares = ("memory", *place)
    return LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.detach, shares=shares)


def from_segment(
    segment: Segment,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    shares: Hashable = None,
    big_endian: bool = False,
) -> LazyTensor:
    """Describe a tensor whose row-major values are exactly the bytes of `segment`.

    Raises:
        CheckpointError: Shape and dtype need another number of bytes.
    """
    needed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != segment.nbytes:
        raise CheckpointError(
            f"shape {list(shape)} of {dtype_name(dtype)} needs {needed} bytes but "
            f"{segment.nbytes} are stored; the file is damaged"
        )

    def load() -> Tensor:
        return as_dtype(read_bytes(segment), dtype, big_endian).reshape(shape)

    extent = segment if isinstance(segment, Extent) and not big_endian else None
    return LazyTensor(shape, dtype, load, extent, shares)


def from_strides(
    storage: Segment,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    *,
    shares: Hashable = None,
    big_endian: bool = False,
) -> LazyTensor:
    """Describe a strided view of a storage; the values are returned contiguous.

    Args:
        storage: All bytes of the storage.
        dtype: Type of its elements.
        shape: Shape of the view.
        stride: Elements to the next value along each axis.
        offset: First element.
        shares: Identity of the storage.
        big_endian: How the bytes are stored.

    Raises:
        CheckpointError: The view leaves the storage, or is absurdly larger than it.
    """
    sizes_ok = len(shape) == len(stride) and min((*shape, *stride, offset), default=0) >= 0
    if not sizes_ok:
        raise CheckpointError(
            f"a tensor has shape {list(shape)}, stride {list(stride)}, offset {offset}; the file "
            "is damaged"
        )
    count = math.prod(shape)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    available = storage.nbytes // dtype.itemsize
    if count and (last >= available or count > available + MAX_EXPANDED):
        raise CheckpointError(
            f"a tensor of shape {list(shape)} and stride {list(stride)} leaves its storage of "
            f"{available} values; the file is damaged"
        )
    identity = None if shares is None or not count else (shares, offset, shape, stride, dtype)
    first, span = offset * dtype.itemsize, (last + 1 - offset) * dtype.itemsize if count else 0

    def load() -> Tensor:
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = as_dtype(read_bytes(storage, first, span), dtype, big_endian)
        return flat.as_strided(shape, stride).contiguous()

    extent = None
    if isinstance(storage, Extent) and not big_endian and _is_contiguous(shape, stride):
        extent = storage.part(first if count else 0, span)
    return LazyTensor(shape, dtype, load, extent, identity)


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size not in (0, 1) and step != expected:
            return False
        expected *= size
    return True


def as_dtype(data: Tensor, dtype: torch.dtype, big_endian: bool = False) -> Tensor:
    """Return raw uint8 bytes as values of `dtype`, in this machine's byte order."""
    if not data.numel():
        return torch.empty(0, dtype=dtype)
    if big_endian != (sys.byteorder == "big") and dtype.itemsize > 1:
        width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        data = data.reshape(-1, width).flip(1).reshape(-1).contiguous()
    return data.view(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
