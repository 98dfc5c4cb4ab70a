"""NumPy archives (.npz): one `.npy` member per array; arrays of objects are refused."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from bnconvert.checkpoint import frameworks
from bnconvert.checkpoint.archive import Inflated
from bnconvert.checkpoint.names import LEAVES
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

MAX_HEADER = 1 << 16


def is_npz(found: Probe) -> bool:
    """Return whether a file is a zip archive of `.npy` members."""
    return found.archive is not None and all(n.endswith(".npy") for n in found.archive.names())


def read(found: Probe, options: Options) -> Weights:
    """Return the arrays of an archive; "a/b/kernel" is taken as a path of layers.

    Raises:
        CheckpointError: A member is damaged or holds objects.
    """
    archive = found.archive
    if archive is None:
        raise CheckpointError(f"{found.path}: is no archive")
    weights = Weights(layout="NumPy arrays")
    for member in archive.names():
        name = member.removesuffix(".npy")
        try:
            tensor = array(archive, member)
        except CheckpointError as error:
            raise CheckpointError(f"{found.path}: {name}: {error}") from error
        *path, leaf = name.split("/")
        if path and leaf not in LEAVES:
            leaf, tensor = frameworks.leaf_of(leaf, tensor)
        frameworks.add(weights.tensors, ".".join(path), leaf, tensor)
    return only_raw(weights, options)


def array(archive: Archive, member: str) -> LazyTensor:
    """Return the array in one `.npy` member.

    Args:
        archive: The archive.
        member: Name of the member.
    """
    segment = archive.segment(member)
    shape, fortran, dtype, start = _header(segment)
    big_endian = dtype.byteorder == ">"
    torch_dtype = numpy_dtype(dtype.str.lstrip("<>=|"))
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


def _header(segment: Segment) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    head = bytes(_first(segment))
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        reader = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = reader(stream)
    except (ValueError, KeyError, SyntaxError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError("has no header of an array; it is damaged") from error
    if dtype.hasobject or dtype.names is not None:
        raise CheckpointError("holds Python objects, which are never unpickled; refused")
    sizes = tuple(int(size) for size in shape)
    if len(sizes) > 64 or min(sizes, default=0) < 0:
        raise CheckpointError(f"has shape {list(sizes)[:8]}; it is damaged")
    return sizes, bool(fortran), dtype, stream.tell()


def _first(segment: Segment) -> bytes:
    if isinstance(segment, Inflated):
        return bytes(next(segment.chunks(), b"")[:MAX_HEADER])
    head = bytearray(min(MAX_HEADER, segment.nbytes))
    segment.read_into(memoryview(head))
    return bytes(head)


FORMAT = Format("NumPy archive", is_npz, read)
