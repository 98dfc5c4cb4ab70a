"""Reading a pickle's bytes, and the arguments of its instructions."""

from __future__ import annotations

import codecs
import io
import struct
from typing import TYPE_CHECKING, cast

from bnconvert.checkpoint.pickle_calls import bad
from bnconvert.checkpoint.pickle_values import LazyBytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from bnconvert.checkpoint.source import Extent

LAZY_FROM = 1 << 16
MAX_LINE = 1 << 16


class PickleReader:
    """Exact reads from a stream, with the number of bytes that are left."""

    def __init__(self, stream: io.BufferedIOBase, nbytes: int, extent: Extent | None = None):
        self.stream = stream
        self.left = nbytes
        self.nbytes = nbytes
        self.extent = extent

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return self.nbytes - self.left

    def read(self, count: int) -> bytes:
        """Return exactly `count` bytes."""
        if count > self.left:
            raise bad("ends early")
        data = self.stream.read(count)
        if len(data) != count:
            raise bad("ends early")
        self.left -= count
        return data

    def line(self) -> bytes:
        """Return a line without its end."""
        data = self.stream.readline(min(self.left, MAX_LINE))
        self.left -= len(data)
        if not data.endswith(b"\n"):
            raise bad("has a line without an end")
        return data[:-1]

    def long_bytes(self, count: int) -> bytes | LazyBytes:
        """Return bytes, left in the file where they are many."""
        if self.extent is None or count < LAZY_FROM:
            return self.read(count)
        lazy = LazyBytes(self.extent.part(self.position, count))
        self.stream.seek(count, io.SEEK_CUR)
        self.left -= count
        return lazy


def unsigned(width: int) -> Callable[[PickleReader], int]:
    """Return a reader of unsigned numbers of `width` bytes."""

    def read(reader: PickleReader) -> int:
        return int.from_bytes(reader.read(width), "little")

    return read


def line_number(reader: PickleReader) -> int:
    """Read a decimal number that ends with its line."""
    return int(short_line(reader))


def short_line(reader: PickleReader) -> str:
    """Read a line that holds one number."""
    line = reader.line()
    if len(line) > 400:
        raise bad("has a number of more than 400 digits")
    return line.decode("ascii")


def int_line(reader: PickleReader) -> int | bool:
    """Read what INT holds: a number, or 00 and 01 for false and true."""
    text = short_line(reader)
    return {"00": False, "01": True}[text] if text in ("00", "01") else int(text)


def long_line(reader: PickleReader) -> int:
    """Read what LONG holds."""
    return int(short_line(reader).removesuffix("L"))


def float_line(reader: PickleReader) -> float:
    """Read what FLOAT holds."""
    return float(short_line(reader))


def signed(reader: PickleReader) -> int:
    """Read a signed number of four bytes."""
    return int.from_bytes(reader.read(4), "little", signed=True)


def double(reader: PickleReader) -> float:
    """Read a double."""
    return cast("float", struct.unpack(">d", reader.read(8))[0])


def escaped_text(reader: PickleReader) -> str:
    """Read the text of protocol 0."""
    return reader.line().decode("raw-unicode-escape")


def big(width: int) -> Callable[[PickleReader], int]:
    """Return a reader of signed numbers whose length comes first, in `width` bytes."""

    def read(reader: PickleReader) -> int:
        count = int.from_bytes(reader.read(width), "little")
        if count > 256:
            raise bad("has a number of more than 256 bytes")
        return int.from_bytes(reader.read(count), "little", signed=True)

    return read


def text_argument(width: int) -> Callable[[PickleReader], str]:
    """Return a reader of UTF-8 text whose length comes first."""

    def read(reader: PickleReader) -> str:
        count = int.from_bytes(reader.read(width), "little")
        return reader.read(count).decode("utf-8", "surrogatepass")

    return read


def bytes_argument(width: int) -> Callable[[PickleReader], bytes | LazyBytes]:
    """Return a reader of bytes whose length comes first; many stay in the file."""

    def read(reader: PickleReader) -> bytes | LazyBytes:
        return reader.long_bytes(int.from_bytes(reader.read(width), "little"))

    return read


def python2_text(width: int) -> Callable[[PickleReader], str | LazyBytes]:
    """Return a reader of the byte strings of Python 2, as latin1 text."""

    def read(reader: PickleReader) -> str | LazyBytes:
        data = reader.long_bytes(int.from_bytes(reader.read(width), "little"))
        return data if isinstance(data, LazyBytes) else data.decode("latin1")

    return read


def quoted(reader: PickleReader) -> str:
    """Read a quoted byte string of protocol 0."""
    line = reader.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise bad("has a text without quotes")
    return codecs.escape_decode(line[1:-1])[0].decode("latin1")
