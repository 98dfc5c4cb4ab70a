"""Zip archives whose directory is checked before anything is believed."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

from bnconvert.checkpoint.source import CHUNK, Extent, Segment
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_RATIO = 200
"""Largest expansion of a compressed member beyond the first 64 MiB (a zip bomb has 1000)."""

_FREE = 1 << 26


class Archive:
    """The members of a zip file, or of a zip file that lies inside another file.

    Args:
        extent: Where the archive lies.

    Raises:
        CheckpointError: The directory is damaged, members overlap or share a name, or the archive
            is encrypted.
    """

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.where = str(extent.file.path)
        try:
            with zipfile.ZipFile(cast("IO[bytes]", _Window(extent))) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise CheckpointError(
                f"{self.where}: its zip directory is damaged or cut ({error}); fetch it again"
            ) from error
        self.members = {member.filename: member for member in members}
        if len(self.members) != len(members):
            raise CheckpointError(f"{self.where}: two members have one name; the file is damaged")
        self._check(members)

    def _check(self, members: list[zipfile.ZipInfo]) -> None:
        spans = sorted(
            (m.header_offset, m.header_offset + 30 + len(m.filename.encode()) + m.compress_size)
            for m in members
        )
        spans.append((self.extent.nbytes, self.extent.nbytes))
        if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
            raise CheckpointError(f"{self.where}: its zip members overlap; the file is damaged")
        if any(m.flag_bits & 1 for m in members):
            raise CheckpointError(f"{self.where}: is encrypted; decrypt it first")

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def names(self) -> list[str]:
        """Return the names of all members in the order of the directory."""
        return list(self.members)

    def segment(self, name: str) -> Segment:
        """Return the bytes of a member: a range of the file, or inflated as they are read."""
        member = self.members.get(name)
        if member is None:
            raise CheckpointError(f"{self.where}: has no member {name!r}; the file is damaged")
        header = self.extent.part(member.header_offset, 30, f"member {name!r}").read()
        if header[:4] != b"PK\3\4":
            raise CheckpointError(f"{self.where}: member {name!r} has no header; it is damaged")
        skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = member.header_offset + 30 + skip
        packed = self.extent.part(start, member.compress_size, f"member {name!r}")
        crc = member.CRC or None  # torch can be told to leave it out, and writes 0 then
        if member.compress_type == zipfile.ZIP_STORED:
            if member.file_size != member.compress_size:
                raise CheckpointError(f"{self.where}: member {name!r} has two sizes; it is damaged")
            return Extent(packed.file, packed.offset, packed.nbytes, crc)
        if member.compress_type != zipfile.ZIP_DEFLATED:
            raise CheckpointError(
                f"{self.where}: member {name!r} is compressed by method {member.compress_type}; "
                "pack it again with deflate or none"
            )
        if member.file_size > _FREE + MAX_RATIO * member.compress_size:
            raise CheckpointError(
                f"{self.where}: member {name!r} would grow from {member.compress_size} to "
                f"{member.file_size} bytes; that is a zip bomb"
            )
        return Inflated(packed, member.file_size, crc, f"{self.where}: member {name!r}")

    def read(self, name: str, limit: int = 1 << 30) -> bytes:
        """Return a member's bytes; one larger than `limit` is refused."""
        segment = self.segment(name)
        if segment.nbytes > limit:
            raise CheckpointError(
                f"{self.where}: member {name!r} has {segment.nbytes} bytes, more than any genuine "
                "file"
            )
        return b"".join(bytes(chunk) for chunk in segment.chunks())


class _Window:
    """A range of a file as zipfile wants to see it."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self.position, self.extent.nbytes)[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self.position = base + offset
        return self.position

    def read(self, count: int = -1) -> bytes:
        left = max(0, self.extent.nbytes - self.position)
        count = left if count < 0 else min(count, left)
        data = self.extent.file.read(self.extent.offset + self.position, count)
        self.position += count
        return data


@dataclass(frozen=True)
class Inflated:
    """A compressed member, inflated as it is read and never beyond its declared size."""

    packed: Extent
    nbytes: int
    crc: int | None
    where: str

    def chunks(self) -> Iterator[memoryview]:
        """Yield all bytes in order.

        Raises:
            CheckpointError: It inflates to another size, or its checksum differs.
        """
        inflate = zlib.decompressobj(-15)
        done, crc = 0, 0
        for packed in itertools.chain(self.packed.chunks(), (memoryview(b""),)):
            data = bytes(packed)
            while True:
                try:
                    out = inflate.decompress(data, CHUNK)
                except zlib.error as error:
                    raise CheckpointError(f"{self.where} is damaged ({error})") from error
                done += len(out)
                if done > self.nbytes:
                    raise CheckpointError(f"{self.where} is larger than it says; it is damaged")
                crc = zlib.crc32(out, crc)
                if out:
                    yield memoryview(out)
                data = inflate.unconsumed_tail
                if not data and len(out) < CHUNK:
                    break
        if done != self.nbytes or (self.crc is not None and crc != self.crc):
            raise CheckpointError(f"{self.where} does not match its checksum; it is damaged")

    def read_into(self, view: memoryview, offset: int = 0) -> None:
        """Fill `view` with the bytes from `offset` on; inflates from the start."""
        position = 0
        for chunk in self.chunks():
            low = max(offset, position)
            high = min(offset + view.nbytes, position + chunk.nbytes)
            if low < high:
                view[low - offset : high - offset] = chunk[low - position : high - position]
            position += chunk.nbytes
