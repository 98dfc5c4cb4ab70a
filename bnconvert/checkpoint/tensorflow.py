"""TensorFlow 2 checkpoints: `NAME.index`, a sorted table, and `NAME.data-?????-of-?????`.

The index is a LevelDB table (github.com/google/leveldb/blob/main/doc/table_format.md) whose values
are BundleEntryProto messages: dtype, shape, shard, offset, size and checksum of each tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bnconvert.checkpoint import frameworks
from bnconvert.checkpoint.copying import raw_bytes
from bnconvert.checkpoint.crc32c import masked
from bnconvert.checkpoint.probe import Probe, inside
from bnconvert.checkpoint.protobuf import Value, fields, number, payload, text
from bnconvert.checkpoint.record import Weights
from bnconvert.checkpoint.registry import Format, Options, only_raw
from bnconvert.checkpoint.source import Extent, SourceFile, read_bytes
from bnconvert.checkpoint.tensors import LazyTensor, as_dtype
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER = 48
MAX_INDEX = 1 << 28
ATTRIBUTE = "/.ATTRIBUTES/VARIABLE_VALUE"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
SLOTS = (".OPTIMIZER_SLOT", "optimizer/", "save_counter", "keras_api/")

DTYPES = {
    1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 5: torch.int16,
    6: torch.int8, 8: torch.complex64, 9: torch.int64, 10: torch.bool, 14: torch.bfloat16,
    17: torch.uint16, 18: torch.complex128, 19: torch.float16, 22: torch.uint32, 23: torch.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies."""

    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc: int = 0


def is_tensorflow(found: Probe) -> bool:
    """Return whether a file is the index of a TensorFlow checkpoint."""
    file = found.file
    return file is not None and file.size >= FOOTER and file.read(file.size - 8, 8) == MAGIC


def read(found: Probe, options: Options) -> Weights:
    """Return the variables of a checkpoint by the path of their layer.

    Raises:
        CheckpointError: A block of the index does not match its checksum, or the data files are
            missing or short.
    """
    table = dict(entries(found.source))
    shards = number(_first(table.get(b"", b""), 1, 1))
    if not 0 < shards <= 10_000:
        raise CheckpointError(f"{found.path}: says it has {shards} shards; it is damaged")
    stem = found.path.name.removesuffix(".index")
    data = [
        SourceFile(inside(found.path.parent, f"{stem}.data-{index:05}-of-{shards:05}"))
        for index in range(shards)
    ]
    names = _full_names(table, data)
    weights = Weights(layout="TensorFlow variables", files=[found.source, *data])
    left_out = 0
    for key, value in table.items():
        name = key.decode("utf-8", "replace")
        if not name or name == GRAPH:
            continue
        entry = _entry(value)
        if entry.dtype not in DTYPES or any(slot in name for slot in SLOTS):
            left_out += 1
            continue
        try:
            _add(weights, names.get(name, name.removesuffix(ATTRIBUTE)), _tensor(entry, data))
        except CheckpointError as error:
            raise CheckpointError(f"{found.path}: {name}: {error}") from error
    if left_out:
        weights.notes.append(f"{left_out} entries left out: optimizer slots, counters and texts")
    return only_raw(weights, options)


def _add(weights: Weights, name: str, tensor: LazyTensor) -> None:
    *path, leaf = name.removesuffix(":0").split("/")
    leaf, tensor = frameworks.leaf_of(leaf, tensor, any("transpose" in p for p in path))
    frameworks.add(weights.tensors, ".".join(path), leaf, tensor)


def entries(file: SourceFile) -> Iterator[tuple[bytes, bytes]]:
    """Yield all keys and values of a LevelDB table.

    Raises:
        CheckpointError: The table is damaged.
    """
    if file.size > MAX_INDEX:
        raise CheckpointError(f"{file.path}: is larger than any genuine index")
    footer = file.read(file.size - FOOTER, FOOTER)
    position = 0
    handles = []
    for _ in range(4):
        value, position = _varint(footer, position)
        handles.append(value)
    seen = 0
    for _, handle in _block(file, handles[2], handles[3]):
        offset, position = _varint(handle, 0)
        size, _ = _varint(handle, position)
        seen += size
        if seen > file.size:
            raise CheckpointError(f"{file.path}: its blocks overlap; it is damaged")
        yield from _block(file, offset, size)


def _block(file: SourceFile, offset: int, size: int) -> list[tuple[bytes, bytes]]:
    data = file.read(offset, size + 5)
    content, kind, crc = data[:size], data[size], data[size + 1 :]
    if masked(data[: size + 1]) != int.from_bytes(crc, "little"):
        raise CheckpointError(f"{file.path}: a block does not match its checksum; it is damaged")
    if kind:
        raise CheckpointError(f"{file.path}: its index is compressed, which TensorFlow never does")
    if size < 4:
        raise CheckpointError(f"{file.path}: a block is too short; it is damaged")
    end = size - 4 - 4 * int.from_bytes(content[-4:], "little")
    position, key = 0, b""
    result = []
    while position < end:
        shared, position = _varint(content, position)
        added, position = _varint(content, position)
        length, position = _varint(content, position)
        if shared > len(key) or position + added + length > end:
            raise CheckpointError(f"{file.path}: a block is damaged")
        key = key[:shared] + content[position : position + added]
        position += added
        result.append((key, content[position : position + length]))
        position += length
    return result


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return result, position
    raise CheckpointError("a number in the index is damaged")


def _first(message: bytes, wanted: int, default: Value) -> Value:
    return next((value for key, _, value in fields(message) if key == wanted), default)


def _entry(message: bytes) -> Entry:
    found: dict[str, int] = {}
    shape: tuple[int, ...] = ()
    names = {1: "dtype", 3: "shard", 4: "offset", 5: "size"}
    for key, _, value in fields(message):
        if key == 2:
            shape = tuple(
                number(_first(bytes(_data(dim)), 1, 0))
                for inner, _, dim in fields(_data(value))
                if inner == 2
            )
        elif key in names:
            found[names[key]] = number(value)
        elif key == 6 and isinstance(value, bytes):
            found["crc"] = int.from_bytes(value, "little")
        elif key == 7:
            raise CheckpointError("holds slices of partitioned variables; save it without them")
    return Entry(shape=shape, **found)


def _data(value: Value) -> bytes:
    data = payload(value)
    return data.read() if isinstance(data, Extent) else data


def _tensor(entry: Entry, data: list[SourceFile]) -> LazyTensor:
    if not 0 <= entry.shard < len(data):
        raise CheckpointError(f"lies in shard {entry.shard} of {len(data)}; the index is damaged")
    dtype = DTYPES[entry.dtype]
    extent = data[entry.shard].extent(entry.offset, entry.size, "a variable")
    if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * dtype.itemsize != entry.size:
        raise CheckpointError(f"has {entry.size} bytes for shape {list(entry.shape)}")

    def load() -> Tensor:
        raw = read_bytes(extent)
        if masked(raw_bytes(raw)) != entry.crc:
            raise CheckpointError(f"{extent.file.path}: a variable does not match its checksum")
        return as_dtype(raw, dtype).reshape(entry.shape)

    return LazyTensor(entry.shape, dtype, load)


def _full_names(table: dict[bytes, bytes], data: list[SourceFile]) -> dict[str, str]:
    """Return variables' own names, such as "conv2d/kernel", by the key in the checkpoint.

    They are in the object graph, a TrackableObjectGraph message that is stored as a string tensor.
    """
    value = table.get(GRAPH.encode())
    if value is None:
        return {}
    entry = _entry(value)
    if not 0 <= entry.shard < len(data):
        return {}
    raw = data[entry.shard].extent(entry.offset, entry.size, "the object graph").read()
    length, start = _varint(raw, 0)
    graph = raw[start + 4 : start + 4 + length]  # a checksum of the lengths lies between
    names: dict[str, str] = {}
    for key, _, node in fields(graph):
        if key != 1:
            continue
        for inner, _, attribute in fields(_data(node)):
            if inner == 2:
                told = {k: v for k, _, v in fields(_data(attribute)) if k in (2, 3)}
                slot = 3 in told and any(slot in text(told[3]) for slot in SLOTS)
                if 2 in told and 3 in told and text(told[2]) and not slot:
                    names[text(told[3])] = text(told[2])
    return names if len(set(names.values())) == len(names) else {}


FORMAT = Format("TensorFlow 2 checkpoint", is_tensorflow, read)
