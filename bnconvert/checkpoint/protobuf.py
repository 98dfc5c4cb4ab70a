"""Protocol buffers, read field by field without their schema's library.

Long payloads are left in the file, so that a message larger than memory can be walked. The wire
format is described at protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from bnconvert.checkpoint.source import Extent, Memory, Segment
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

LAZY_FROM = 1 << 16

Value = int | bytes | Extent
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(message: bytes | Segment) -> Iterator[tuple[int, int, Value]]:
    """Yield number, wire type and value of every field of a message, in order.

    Args:
        message: The message; payloads of many bytes are yielded as ranges of its file.

    Raises:
        CheckpointError: The bytes are no message.
    """
    if isinstance(message, Extent):
        with message.file.open() as stream:
            stream.seek(message.offset)
            yield from _fields(stream, message.nbytes, message)
        return
    data = message if isinstance(message, bytes) else _bytes(message)
    yield from _fields(io.BytesIO(data), len(data), None)


def _bytes(segment: Segment) -> bytes:
    return segment.data if isinstance(segment, Memory) else b"".join(map(bytes, segment.chunks()))


def _fields(
    stream: io.BufferedIOBase, nbytes: int, extent: Extent | None
) -> Iterator[tuple[int, int, Value]]:
    position = 0
    while position < nbytes:
        key, used = _varint(stream, nbytes - position)
        position += used
        number, wire = key >> 3, key & 7
        if not number:
            raise _bad()
        if wire == VARINT:
            value, used = _varint(stream, nbytes - position)
            position += used
            yield number, wire, value
            continue
        if wire == BYTES:
            length, used = _varint(stream, nbytes - position)
            position += used
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise _bad()
        if length > nbytes - position:
            raise _bad()
        if extent is not None and length >= LAZY_FROM:
            start = position
            position += length
            yield number, wire, extent.part(start, length)
            stream.seek(extent.offset + position)
            continue
        data = stream.read(length)
        if len(data) != length:
            raise _bad()
        position += length
        yield number, wire, data


def _varint(stream: io.BufferedIOBase, left: int) -> tuple[int, int]:
    result = 0
    for used in range(min(10, left)):
        byte = stream.read(1)
        if not byte:
            break
        result |= (byte[0] & 0x7F) << (7 * used)
        if not byte[0] & 0x80:
            return result & (1 << 64) - 1, used + 1
    raise _bad()


def _bad() -> CheckpointError:
    return CheckpointError("its protocol buffer is damaged or cut; fetch it again")


def text(value: Value) -> str:
    """Return a short string field."""
    if not isinstance(value, bytes):
        raise _bad()
    return value.decode("utf-8", "replace")


def number(value: Value) -> int:
    """Return an integer field as a signed 64-bit number."""
    if not isinstance(value, int):
        raise _bad()
    return value - (1 << 64) if value >= 1 << 63 else value


def payload(value: Value) -> bytes | Extent:
    """Return a field that holds bytes or another message."""
    if isinstance(value, int):
        raise _bad()
    return value


def varints(value: Value) -> list[int]:
    """Return a repeated integer field: one number, or many packed."""
    if isinstance(value, int):
        return [number(value)]
    data = value.read() if isinstance(value, Extent) else value
    result, stream, position = [], io.BytesIO(data), 0
    while position < len(data):
        item, used = _varint(stream, len(data) - position)
        result.append(number(item))
        position += used
    return result
