"""MessagePack, as far as Flax uses it, with long byte strings left in the file.

The format is described at github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

from bnconvert.checkpoint.source import Extent, Memory
from bnconvert.errors import CheckpointError

MAX_DEPTH = 64
LAZY_FROM = 1 << 16
MAX_ITEMS = 5_000_000

_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_SIMPLE = {0xC0: None, 0xC2: False, 0xC3: True}
_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_STR = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}


@dataclass(frozen=True)
class Extension:
    """An extension value: its type and its bytes."""

    kind: int
    data: Extent | Memory


class Unpacker:
    """Reads one value from a stream.

    Args:
        stream: At the start of the value.
        nbytes: Bytes that belong to it.
        extent: Where they lie, so that long byte strings can be left there.
    """

    def __init__(self, stream: io.BufferedIOBase, nbytes: int, extent: Extent | None) -> None:
        self.stream = stream
        self.nbytes = nbytes
        self.extent = extent
        self.position = 0
        self.items = 0

    def value(self, depth: int = 0) -> Any:
        """Return the next value.

        Raises:
            CheckpointError: The bytes are no MessagePack, or nested absurdly.
        """
        self.items += 1
        if depth > MAX_DEPTH or self.items > MAX_ITEMS:
            raise CheckpointError("its MessagePack is nested or filled beyond any genuine file")
        code = self._take(1)[0]
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 256
        if code in _SIMPLE:
            return _SIMPLE[code]
        if code in _NUMBERS:
            layout = _NUMBERS[code]
            return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return self._sized(code, depth)

    def _sized(self, code: int, depth: int) -> Any:
        if code <= 0x8F:
            return self._map(code & 15, depth)
        if code <= 0x9F:
            return [self.value(depth + 1) for _ in range(code & 15)]
        if code <= 0xBF:
            return self._text(code & 31)
        if code in _STR:
            return self._text(self._count(_STR[code]))
        if code in _BIN:
            return self._bytes(self._count(_BIN[code]))
        if code in _ARRAY:
            return self._list(self._count(_ARRAY[code]), depth)
        if code in _MAP:
            return self._map(self._count(_MAP[code]), depth)
        return self._extension(code)

    def _extension(self, code: int) -> Extension:
        if 0xD4 <= code <= 0xD8:
            count = 1 << (code - 0xD4)
        elif code in _EXT:
            count = self._count(_EXT[code])
        else:
            raise CheckpointError("its MessagePack is damaged")
        kind = self._take(1)[0]
        return Extension(kind, self._bytes(count))

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int)):
                raise CheckpointError("its MessagePack has a key that is no text")
            if key in result:
                raise CheckpointError(f"its MessagePack has the key {key!r} twice; it is damaged")
            result[key] = self.value(depth + 1)
        return result

    def _count(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _text(self, count: int) -> str:
        return self._take(count).decode("utf-8", "replace")

    def _bytes(self, count: int) -> Extent | Memory:
        if self.extent is None or count < LAZY_FROM:
            return Memory(self._take(count))
        part = self.extent.part(self.position, count, "an array")
        self.position += count
        self.stream.seek(self.extent.offset + self.position)
        return part

    def _take(self, count: int) -> bytes:
        if count > self.nbytes - self.position:
            raise CheckpointError("its MessagePack ends early; it is damaged or cut")
        data = self.stream.read(count)
        if len(data) != count:
            raise CheckpointError("its MessagePack ends early; it was cut")
        self.position += count
        return data


def unpack(segment: Extent | Memory) -> Any:
    """Return the one value that some bytes hold.

    Raises:
        CheckpointError: It is no MessagePack, or something follows it.
    """
    if isinstance(segment, Memory):
        return _whole(Unpacker(io.BytesIO(segment.data), segment.nbytes, None))
    with segment.file.open() as stream:
        stream.seek(segment.offset)
        return _whole(Unpacker(stream, segment.nbytes, segment))


def _whole(unpacker: Unpacker) -> Any:
    value = unpacker.value()
    if unpacker.position != unpacker.nbytes:
        raise CheckpointError("bytes follow its MessagePack; it is damaged")
    return value
