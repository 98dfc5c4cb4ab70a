"""Files and byte ranges that are read piece by piece, and noticed when they change underneath.

Nothing here maps a file into memory: a mapped file that is cut short while it is read ends the
process, where a short read is an error that can be reported.
"""

from __future__ import annotations

import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from torch import Tensor

CHUNK = 1 << 18
"""Bytes that are moved at a time: what stays in the processor's cache is moved twice as fast."""


class SourceFile:
    """A regular file of fixed content: every later read checks that it is still the same file.

    Attributes:
        path: The file as it was named.
        size: Its length in bytes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self._open() as stream:
            self._stamp = _stamp(stream)
        self.size = self._stamp[2]

    def _open(self) -> io.BufferedReader:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{self.path}: is not a regular file; name a file of weights")
        return os.fdopen(descriptor, "rb")

    def open(self) -> io.BufferedReader:
        """Return a new stream; raises `CheckpointError` if the file is not what it was."""
        stream = self._open()
        if _stamp(stream) != self._stamp:
            stream.close()
            raise CheckpointError(f"{self.path}: changed while it was read; read it again")
        return stream

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes; a file that ends earlier is a `CheckpointError`."""
        self.check_range(offset, nbytes, "a part")
        with self.open() as stream:
            stream.seek(offset)
            data = stream.read(nbytes)
        if len(data) != nbytes:
            raise CheckpointError(f"{self.path}: ends at byte {offset + len(data)}; it was cut")
        return data

    def check_range(self, offset: int, nbytes: int, what: str) -> None:
        """Refuse a byte range that does not lie in the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: {what} should lie at bytes {offset} to {offset + nbytes}, but the "
                f"file has {self.size}; it is damaged or cut, fetch it again"
            )

    def extent(self, offset: int = 0, nbytes: int | None = None, what: str = "a part") -> Extent:
        """Return a byte range of the file, checked against its length."""
        nbytes = self.size - offset if nbytes is None else nbytes
        self.check_range(offset, nbytes, what)
        return Extent(self, offset, nbytes)

    def unchanged(self) -> None:
        """Raise `CheckpointError` if the file is not what it was when first seen."""
        self.open().close()


def _stamp(stream: io.BufferedReader) -> tuple[int, int, int, int]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Segment(Protocol):
    """Bytes that can be read in parts: a range of a file, or an inflated archive member."""

    @property
    def nbytes(self) -> int:
        """Number of bytes."""

    def read_into(self, view: memoryview, offset: int = 0) -> None:
        """Fill `view` with the bytes from `offset` on."""

    def chunks(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a view is valid until the next one is asked for."""


@dataclass(frozen=True)
class Extent:
    """A byte range of a file, known to lie inside it, with its CRC-32 where the file has one."""

    file: SourceFile
    offset: int
    nbytes: int
    crc: int | None = None

    def part(self, offset: int, nbytes: int, what: str = "a part") -> Extent:
        """Return a range inside this one; outside of it is a `CheckpointError`."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CheckpointError(
                f"{self.file.path}: {what} asks for bytes {offset} to {offset + nbytes} of a "
                f"block of {self.nbytes}; it is damaged, fetch it again"
            )
        whole = offset == 0 and nbytes == self.nbytes
        return Extent(self.file, self.offset + offset, nbytes, self.crc if whole else None)

    def extents(self) -> tuple[Extent, ...]:
        """Return the ranges of files that this is."""
        return (self,)

    def read(self) -> bytes:
        """Return all bytes."""
        data = self.file.read(self.offset, self.nbytes)
        self._check(zlib.crc32(data) if self.crc is not None else 0)
        return data

    def _check(self, crc: int) -> None:
        if self.crc is not None and crc != self.crc:
            raise CheckpointError(
                f"{self.file.path}: the bytes at {self.offset} do not match their checksum; the "
                "file is damaged, fetch it again"
            )

    def read_into(self, view: memoryview, offset: int = 0) -> None:
        """Fill `view` with the bytes from `offset` on."""
        part = self.part(offset, view.nbytes)
        with self.file.open() as stream:
            stream.seek(part.offset)
            _fill(stream, view, self.file.path)
        part._check(zlib.crc32(view) if part.crc is not None else 0)

    def chunks(self) -> Iterator[memoryview]:
        """Yield all bytes in order through one reused buffer."""
        buffer = memoryview(bytearray(min(CHUNK, self.nbytes)))
        with self.file.open() as stream:
            stream.seek(self.offset)
            done = crc = 0
            while done < self.nbytes:
                view = buffer[: min(CHUNK, self.nbytes - done)]
                _fill(stream, view, self.file.path)
                crc = zlib.crc32(view, crc) if self.crc is not None else 0
                yield view
                done += view.nbytes
        self._check(crc)


def _fill(stream: io.BufferedReader, view: memoryview, path: Path) -> None:
    done = 0
    while done < view.nbytes:
        count = stream.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{path}: ends early; it was cut while it was read")
        done += count


@dataclass(frozen=True)
class Joined:
    """Ranges of files, one after the other."""

    parts: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(part.nbytes for part in self.parts)

    def extents(self) -> tuple[Extent, ...]:
        """Return the ranges of files that this is."""
        return self.parts

    def chunks(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a view is valid until the next one is asked for."""
        for part in self.parts:
            yield from part.chunks()


@dataclass(frozen=True)
class Memory:
    """Bytes that were already read, where they came inside another structure."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return len(self.data)

    def part(self, offset: int, nbytes: int, what: str = "a part") -> Memory:
        """Return a range of these bytes; outside of them is a `CheckpointError`."""
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self.data):
            raise CheckpointError(f"{what} leaves its block; the file is damaged")
        return Memory(self.data[offset : offset + nbytes])

    def read(self) -> bytes:
        """Return all bytes."""
        return self.data

    def read_into(self, view: memoryview, offset: int = 0) -> None:
        """Fill `view` with the bytes from `offset` on."""
        view[:] = memoryview(self.data)[offset : offset + view.nbytes]

    def chunks(self) -> Iterator[memoryview]:
        """Yield all bytes at once."""
        yield memoryview(self.data)


def read_bytes(segment: Segment, offset: int = 0, nbytes: int | None = None) -> Tensor:
    """Return bytes of a segment as a new uint8 tensor."""
    count = segment.nbytes - offset if nbytes is None else nbytes
    data = torch.empty(count, dtype=torch.uint8)
    if count:
        segment.read_into(memoryview(data.numpy().data), offset)
    return data
