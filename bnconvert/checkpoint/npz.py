"""NumPy archives (.npz): one `.npy` member per array; arrays of objects are refused."""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import frameworks
from bnconvert.checkpoint.archive import Inflated
from bnconvert.checkpoint.names import LEAVES, listed
from bnconvert.checkpoint.pickle_values import numpy_dtype
from bnconvert.checkpoint.record import Weights
from bnconvert.checkpoint.registry import Format, Options, only_raw
from bnconvert.checkpoint.source import Extent, Segment, read_bytes
from bnconvert.checkpoint.tensors import LazyTensor, as_dtype, from_segment, from_strides
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.checkpoint.archive import Archive
    from bnconvert.checkpoint.probe import Probe

MAX_HEADER = 10_000
"""Bytes, as numpy allows: a longer literal can exhaust the parser."""


def is_npz(found: Probe) -> bool:
    """Return whether a file is a zip archive of `.npy` members."""
    names = found.archive.names() if found.archive is not None else []
    return bool(names) and all(name.endswith(".npy") for name in names)


def read(found: Probe, options: Options) -> Weights:
    """Return the arrays of an archive; "a/b/kernel" is taken as a path of layers.

    Raises:
        CheckpointError: A member is damaged or holds objects.
    """
    archive = found.archive
    if archive is None:
        raise CheckpointError(f"{found.path}: is no archive")
    weights = Weights(layout="NumPy arrays")
    texts: list[str] = []
    for member in archive.names():
        name = member.removesuffix(".npy")
        try:
            if _is_text(archive.segment(member)):
                texts.append(name)
                continue
            tensor = array(archive, member)
        except CheckpointError as error:
            raise CheckpointError(f"{found.path}: {name}: {error}") from error
        *path, leaf = name.split("/")
        if path and leaf not in LEAVES:
            leaf, tensor = frameworks.leaf_of(leaf, tensor)
        frameworks.add(weights.tensors, ".".join(path), leaf, tensor)
    if texts:
        weights.notes.append(f"left out, because they are text: {listed(texts)}")
    return only_raw(weights, options)


def _is_text(segment: Segment) -> bool:
    code = _header(segment)[2]
    return code.lstrip("<>=|")[:1] in {"U", "S"}


def array(archive: Archive, member: str) -> LazyTensor:
    """Return the array in one `.npy` member.

    Args:
        archive: The archive.
        member: Name of the member.
    """
    segment = archive.segment(member)
    shape, fortran, code, start = _header(segment)
    big_endian = code.startswith(">")
    torch_dtype = numpy_dtype(code.lstrip("<>=|"))
    nbytes = math.prod(shape) * torch_dtype.itemsize
    if nbytes != segment.nbytes - start:
        raise CheckpointError(
            f"shape {list(shape)} needs {nbytes} bytes but {segment.nbytes - start} follow"
        )
    if isinstance(segment, Extent):
        data: Segment = segment.part(start, nbytes)
        if not fortran:
            return from_segment(data, torch_dtype, shape, big_endian=big_endian)
        stride = tuple(math.prod(shape[:axis]) for axis in range(len(shape)))
        return from_strides(data, torch_dtype, shape, stride, 0, big_endian=big_endian)

    def load() -> Tensor:
        flat = as_dtype(read_bytes(segment, start, nbytes), torch_dtype, big_endian)
        if fortran:
            return flat.reshape(shape[::-1]).permute(*reversed(range(len(shape)))).contiguous()
        return flat.reshape(shape)

    return LazyTensor(shape, torch_dtype, load)


def _header(segment: Segment) -> tuple[tuple[int, ...], bool, str, int]:
    """Return shape, whether Fortran's order, type code and where the values begin."""
    head = _first(segment)
    width = {b"\x93NUMPY\1\0": 2, b"\x93NUMPY\2\0": 4, b"\x93NUMPY\3\0": 4}.get(head[:8], 0)
    start = 8 + width
    end = start + int.from_bytes(head[8:start], "little")
    if not width or end > len(head):
        raise CheckpointError("has no header of an array; it is damaged")
    described = _literal(head[start:end].decode("latin1"))
    shape, code = described.get("shape"), described.get("descr")
    sizes = shape if isinstance(shape, tuple) else (-1,)
    if len(sizes) > 64 or not all(type(size) is int and size >= 0 for size in sizes):
        raise CheckpointError(f"has shape {str(shape)[:80]}; it is damaged")
    if not isinstance(code, str) or "O" in code:
        raise CheckpointError("holds Python objects, which are never unpickled; refused")
    return sizes, described.get("fortran_order") is True, code, end


def _literal(text: str) -> dict[str, Any]:
    """Return the dictionary that a header is; Python 2 wrote its numbers as 3L."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser, on texts that are damaged
            value = ast.literal_eval(re.sub(r"(?<=\d)L\b", "", text.strip()))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise CheckpointError("has a header that cannot be read; it is damaged") from error
    return value if isinstance(value, dict) else {}


def _first(segment: Segment) -> bytes:
    if isinstance(segment, Inflated):
        return bytes(next(segment.chunks(), b"")[:MAX_HEADER])
    head = bytearray(min(MAX_HEADER, segment.nbytes))
    segment.read_into(memoryview(head))
    return bytes(head)


FORMAT = Format("NumPy archive", is_npz, read)
