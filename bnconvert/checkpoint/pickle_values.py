"""What a pickle's instructions build here: data and inert descriptions, no live objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint.source import Extent, Memory, Segment
from bnconvert.checkpoint.tensors import LazyTensor, from_segment, from_strides
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Global:
    """The name of something in a Python module; never imported."""

    name: str


@dataclass(eq=False)
class Instance:
    """An object of some class, described by what its pickle holds and never created.

    Attributes:
        type: Qualified name of the class.
        args: Arguments of its construction.
        state: What the pickle would have given to `__setstate__` or `__dict__`.
        items: Entries, for a class derived from dict.
        elements: Elements, for a class derived from list or set.
    """

    type: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    def attributes(self) -> dict[Any, Any]:
        """Return the instance's attributes, wherever its pickle put them."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        merged: dict[Any, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                merged.update(part)
        return merged


class PickledDict(dict[Any, Any]):
    """An OrderedDict or defaultdict; `state` is what was stored as its attributes."""

    state: Any = None


@dataclass(eq=False)
class Storage:
    """The memory of tensors.

    Attributes:
        key: Its name in the file.
        dtype: Type of its elements; uint8 for untyped storages.
        numel: Number of elements.
        segment: Where the bytes are; filled in when the reader knows.
        big_endian: How they are stored.
        base: Elements before the first, for a view of a larger storage (very old files).
    """

    key: str
    dtype: torch.dtype
    numel: int
    segment: Segment | None = None
    big_endian: bool = False
    base: int = 0


@dataclass(eq=False)
class TensorNode:
    """A tensor as a pickle describes it; `storage` is None where the file holds no values."""

    storage: Storage | None
    dtype: torch.dtype | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str = "tensor"
    parameter: bool = False

    def lazy(self) -> LazyTensor:
        """Return the tensor, ready to be read.

        Raises:
            CheckpointError: It has no values (meta, sparse, quantized), or leaves its storage.
        """
        storage = self.storage
        if storage is None or storage.segment is None or self.dtype is None:
            raise CheckpointError(f"is a {self.kind}, which has no plain values to read")
        return from_strides(
            storage.segment,
            self.dtype,
            self.shape,
            self.stride,
            self.offset + storage.base,
            shares=storage,
            big_endian=storage.big_endian,
        )


@dataclass(eq=False)
class NumpyDtype:
    """A numpy dtype such as "f4"."""

    code: str
    big_endian: bool = False


@dataclass(eq=False)
class NumpyArray:
    """A numpy array whose bytes lie in the pickle."""

    shape: tuple[int, ...] = ()
    dtype: NumpyDtype | None = None
    fortran: bool = False
    data: Segment | None = None

    def lazy(self) -> LazyTensor:
        """Return the array as a tensor; raises `CheckpointError` for other than plain numbers."""
        if self.dtype is None or self.data is None:
            raise CheckpointError("is a numpy array of Python objects")
        dtype = numpy_dtype(self.dtype.code)
        if not self.fortran:
            return from_segment(
                self.data, dtype, self.shape, shares=self, big_endian=self.dtype.big_endian
            )
        if math.prod(self.shape) * dtype.itemsize != self.data.nbytes:
            raise CheckpointError(f"a numpy array of shape {list(self.shape)} has other bytes")
        stride = tuple(math.prod(self.shape[:axis]) for axis in range(len(self.shape)))
        return from_strides(
            self.data, dtype, self.shape, stride, 0, shares=self, big_endian=self.dtype.big_endian
        )


@dataclass(eq=False)
class LazyBytes:
    """A long run of bytes that was left in the file."""

    extent: Extent


_NUMPY = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "b1": torch.bool,
    "c8": torch.complex64,
    "c16": torch.complex128,
}


def numpy_dtype(code: str) -> torch.dtype:
    """Return the torch dtype of a numpy type code without its byte order, such as "f4"."""
    if code not in _NUMPY:
        raise CheckpointError(f"numpy type {code!r} is not one of numbers")
    return _NUMPY[code]


def bytes_of(value: Any) -> Segment:
    """Return the bytes of a pickled string or bytes value."""
    if isinstance(value, LazyBytes):
        return value.extent
    if isinstance(value, str):
        value = value.encode("latin1", "replace")
    if isinstance(value, (bytes, bytearray)):
        return Memory(bytes(value))
    raise CheckpointError("the bytes of an array are not bytes; the file is damaged")


def as_lazy(value: Any) -> LazyTensor | None:
    """Return a tensor for a value that describes one, else None."""
    if isinstance(value, (TensorNode, NumpyArray)):
        return value.lazy()
    return value if isinstance(value, LazyTensor) else None


def is_tensor(value: Any) -> bool:
    """Return whether a value describes a tensor or an array."""
    return isinstance(value, (TensorNode, NumpyArray, LazyTensor))


def walk_values(root: Any) -> Iterator[Any]:
    """Yield every value reachable from `root` once, however deep, shared or cyclic."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            pending.extend(value.values())
            state = getattr(value, "state", None)
            if state is not None:
                pending.append(state)
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending.extend(value)
        elif isinstance(value, Instance):
            pending.extend((value.args, value.state, value.items, value.elements))
