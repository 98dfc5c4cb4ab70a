"""A zip file of stored members, written from start to end, each member's bytes aligned."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bnconvert.checkpoint.copying import FileOutput

ALIGNMENT = 64
"""torch maps storages into memory at this alignment."""

LARGE_FROM = 0xFFFFFFFF
"""Sizes and offsets from here on are written in 64 bits."""

_ELSEWHERE = 0xFFFFFFFF
_TIME, _DATE = 0, 0x21  # 1980-01-01: a copy of the same weights is the same file


@dataclass(frozen=True)
class _Member:
    name: bytes
    offset: int
    nbytes: int
    crc: int


class ZipWriter:
    """Appends members to a file.

    Args:
        output: Where to write; its descriptor must be seekable.
    """

    def __init__(self, output: FileOutput) -> None:
        self.output = output
        self.members: list[_Member] = []
        self.position = 0

    def add(self, name: str, nbytes: int, chunks: Iterable[memoryview]) -> None:
        """Append one member.

        Args:
            name: Its name.
            nbytes: Number of bytes that `chunks` will bring.
            chunks: The bytes.
        """
        start = self.position
        header = self._local_header(name.encode(), nbytes)
        self._write(memoryview(header))
        crc = done = 0
        for chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            done += chunk.nbytes
            self._write(chunk)
        if done != nbytes:
            raise ValueError(f"{name}: {done} bytes written, {nbytes} announced")
        os.pwrite(self.output.descriptor, struct.pack("<I", crc), start + 14)
        self.members.append(_Member(name.encode(), start, nbytes, crc))

    def _write(self, data: memoryview) -> None:
        self.output.write(data)
        self.position += data.nbytes

    def _local_header(self, name: bytes, nbytes: int) -> bytes:
        large = nbytes >= LARGE_FROM
        size = _short(nbytes)
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
        unpadded = self.position + 30 + len(name) + len(extra) + 4
        padding = -unpadded % ALIGNMENT
        extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        fixed = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 45 if large else 0, 0x0800, 0, _TIME, _DATE,
            0, size, size, len(name), len(extra),
        )  # fmt: skip
        return fixed + name + extra

    def close(self) -> None:
        """Write the directory."""
        start = self.position
        for member in self.members:
            self._write(memoryview(_directory_entry(member)))
        self._write(memoryview(_end(len(self.members), self.position - start, start)))


def _short(value: int) -> int:
    """Return a value for a 32-bit field, or the mark that says it stands elsewhere."""
    return _ELSEWHERE if value >= LARGE_FROM else value


def _directory_entry(member: _Member) -> bytes:
    values = [v for v in (member.nbytes, member.nbytes, member.offset) if v >= LARGE_FROM]
    extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    size, offset = _short(member.nbytes), _short(member.offset)
    fixed = struct.pack(
        "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45 if values else 0, 0x0800, 0, _TIME, _DATE,
        member.crc, size, size, len(member.name), len(extra), 0, 0, 0, 0, offset,
    )  # fmt: skip
    return fixed + member.name + extra


def _end(count: int, nbytes: int, start: int) -> bytes:
    large = b""
    if count >= 0xFFFF or start + nbytes >= LARGE_FROM:
        large = struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, start
        ) + struct.pack("<IIQI", 0x07064B50, 0, start + nbytes, 1)
    return large + struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, min(count, 0xFFFF), min(count, 0xFFFF),
        _short(nbytes), _short(start), 0,
    )  # fmt: skip
