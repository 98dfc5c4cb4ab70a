"""safetensors files: a JSON header of names, dtypes, shapes and offsets, then the bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import metadata
from bnconvert.checkpoint.record import Weights
from bnconvert.checkpoint.registry import Format, Options, only_raw
from bnconvert.checkpoint.tensors import LazyTensor, from_segment
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from bnconvert.checkpoint.probe import Probe
    from bnconvert.checkpoint.source import SourceFile

MAX_HEADER = 100_000_000
"""The limit of the format's own library."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def header_length(start: bytes) -> int | None:
    """Return the length of the header if these first bytes can begin a safetensors file."""
    if len(start) < 9 or start[8:9] != b"{":
        return None
    return int.from_bytes(start[:8], "little")


def read_header(file: SourceFile) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata.

    Args:
        file: The file.

    Raises:
        CheckpointError: The header is not a header, names a tensor twice, or its offsets do not
            cover the rest of the file exactly once.
    """
    start = file.read(0, min(9, file.size))
    length = header_length(start)
    if length is None:
        raise CheckpointError(f"{file.path}: is no safetensors file")
    if length > min(MAX_HEADER, file.size - 8):
        raise CheckpointError(
            f"{file.path}: its header should have {length} bytes, but the file has {file.size}; "
            "it is damaged or cut, fetch it again"
        )
    header = _parse(file, file.read(8, length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file.path}: its metadata is not text; it is damaged")
    base = 8 + length
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, LazyTensor] = {}
    for name, entry in header.items():
        tensors[name], span = _tensor(file, name, entry, base)
        spans.append((*span, name))
    _check_spans(file, sorted(spans), file.size - base)
    return tensors, metadata


def _parse(file: SourceFile, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise CheckpointError(f"{file.path}: its header has one name twice; it is damaged")
        return result

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: its header is not JSON; it is damaged") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: its header is not a dictionary; it is damaged")
    return header


def _tensor(
    file: SourceFile, name: str, entry: Any, base: int
) -> tuple[LazyTensor, tuple[int, int]]:
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file.path}: {name} is described wrongly; it is damaged") from error
    if not numbers or not isinstance(code, str):
        raise CheckpointError(f"{file.path}: {name} is described wrongly; it is damaged")
    if code not in DTYPES:
        raise CheckpointError(f"{file.path}: {name} has type {code}, which torch has not")
    extent = file.extent(base + begin, end - begin, name)
    try:
        return from_segment(extent, DTYPES[code], shape), (begin, end)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {name}: {error}") from error


def _check_spans(file: SourceFile, spans: list[tuple[int, int, str]], nbytes: int) -> None:
    position = 0
    for begin, end, name in spans:
        if begin != position:
            raise CheckpointError(
                f"{file.path}: {name} begins at byte {begin} where {position} is free; the file is "
                "damaged"
            )
        position = end
    if position != nbytes:
        raise CheckpointError(
            f"{file.path}: its tensors take {position} bytes but {nbytes} follow the header; the "
            "file is damaged or cut"
        )


def _matches(found: Probe) -> bool:
    return found.file is not None and header_length(found.head) is not None


def _read(found: Probe, options: Options) -> Weights:
    tensors, texts = read_header(found.source)
    weights = Weights(tensors)
    metadata.read(weights, texts)
    return only_raw(weights, options)


FORMAT = Format("safetensors", _matches, _read)
