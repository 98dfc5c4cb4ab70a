"""torch distributed checkpoints: a folder with `.metadata` and files of tensor pieces.

`.metadata` is a pickle that says which piece of which tensor lies where; every piece is a small
torch zip file inside a larger one. Pieces are put together when a tensor is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bnconvert.checkpoint import torch_zip
from bnconvert.checkpoint.pickle_calls import sizes
from bnconvert.checkpoint.pickle_policy import check
from bnconvert.checkpoint.pickle_reader import PickleReader
from bnconvert.checkpoint.pickle_values import Instance, as_lazy
from bnconvert.checkpoint.pickle_vm import PickleMachine
from bnconvert.checkpoint.probe import Probe, inside
from bnconvert.checkpoint.registry import Format, Options, from_tree
from bnconvert.checkpoint.source import Extent, Joined, SourceFile
from bnconvert.checkpoint.tensors import LazyTensor
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from bnconvert.checkpoint.record import Weights

METADATA = ".metadata"
MAX_PIECES = 4096
_TORCH_DCP = "torch.distributed.checkpoint."


@dataclass(frozen=True)
class Piece:
    """A block of a tensor: where it begins and how large it is, along each axis."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a piece lies: a range of a file of the folder."""

    file: str
    offset: int
    nbytes: int


def is_dcp(found: Probe) -> bool:
    """Return whether a path is a folder with `.metadata`."""
    return found.is_folder and (found.path / METADATA).is_file()


def read_tree(folder: Path, allow: Iterable[str] = ()) -> tuple[dict[Any, Any], list[SourceFile]]:
    """Return the saved object with its tensors, and the files it lies in.

    Values that are no tensors are None: their place in the tree is what recognising needs.

    Args:
        folder: The checkpoint.
        allow: Names of classes admitted as inert stand-ins.

    Raises:
        CheckpointError: The metadata is damaged, leads out of the folder, or does not cover a
            tensor with pieces exactly once.
    """
    metadata_file = SourceFile(folder / METADATA)
    metadata = _metadata(metadata_file, allow)
    described = _dictionary(metadata, "state_dict_metadata")
    places = _places(metadata, folder)
    files = {
        name: SourceFile(inside(folder, name))
        for name in dict.fromkeys(place.file for place in places.values())
    }
    _check_places(places.values(), files)
    flat: dict[str, Any] = {}
    for name, entry in described.items():
        if isinstance(entry, Instance) and entry.type.endswith(".TensorStorageMetadata"):
            try:
                flat[name] = _tensor(name, entry, places, files)
            except CheckpointError as error:
                raise CheckpointError(f"{folder}: {name}: {error}") from error
        else:
            flat[name] = None
    paths = metadata.attributes().get("planner_data")
    tree = nested(flat, paths if isinstance(paths, dict) else {})
    return tree, [metadata_file, *files.values()]


def _metadata(file: SourceFile, allow: Iterable[str]) -> Instance:
    with file.open() as stream:
        machine = PickleMachine(PickleReader(stream, file.size), None, allow)
        value = machine.run()
    check(machine, str(file.path), lambda _: False, value)
    if not isinstance(value, Instance) or not value.type.startswith(_TORCH_DCP):
        raise CheckpointError(f"{file.path}: is not the metadata of a distributed checkpoint")
    return value


def _dictionary(metadata: Instance, name: str) -> dict[Any, Any]:
    value = metadata.attributes().get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"its metadata has no {name}; it is damaged")
    return value


def _places(metadata: Instance, folder: Path) -> dict[tuple[str, tuple[int, ...] | None], Place]:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, info in _dictionary(metadata, "storage_data").items():
        if not isinstance(index, Instance) or not isinstance(info, Instance):
            raise CheckpointError(f"{folder}: its storage data is damaged")
        key, value = index.attributes(), info.attributes()
        file, offset, nbytes = (value.get(n) for n in ("relative_path", "offset", "length"))
        name, at = key.get("fqn"), key.get("offset")
        if value.get("transform_descriptors"):
            raise CheckpointError(
                f"{folder}: its pieces are transformed (compressed); load it with torch and save "
                "it without"
            )
        whole = isinstance(file, str) and type(offset) is int and type(nbytes) is int
        if not whole or not isinstance(name, str):
            raise CheckpointError(f"{folder}: its storage data is damaged")
        place = Place(str(file), int(offset or 0), int(nbytes or 0))
        places[name, None if at is None else sizes(at)] = place
    return places


def _check_places(places: Iterable[Place], files: dict[str, SourceFile]) -> None:
    """Refuse pieces that lie outside their file or over each other."""
    ends: dict[str, int] = {}
    for place in sorted(places, key=lambda p: (p.file, p.offset, p.nbytes)):
        file = files[place.file]
        file.check_range(place.offset, place.nbytes, "a piece")
        if place.nbytes and place.offset < ends.get(place.file, 0):
            raise CheckpointError(f"{file.path}: two pieces overlap; the metadata is damaged")
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.nbytes)


def _tensor(
    name: str,
    entry: Instance,
    places: dict[tuple[str, tuple[int, ...] | None], Place],
    files: dict[str, SourceFile],
) -> LazyTensor:
    shape = sizes(entry.attributes().get("size"))
    chunks = entry.attributes().get("chunks")
    if not isinstance(chunks, list) or not 0 < len(chunks) <= MAX_PIECES:
        raise CheckpointError(f"has {len(chunks) if isinstance(chunks, list) else 'no'} pieces")
    pieces = [_piece(chunk) for chunk in chunks]
    check_cover(shape, pieces)
    parts: list[tuple[Piece, LazyTensor]] = []
    for piece in pieces:
        place = places.get((name, piece.offset)) or places.get((name, None))
        if place is None:
            raise CheckpointError(f"its piece at {list(piece.offset)} is stored nowhere")
        extent = files[place.file].extent(place.offset, place.nbytes)
        value, _ = torch_zip.read_pickle(extent)
        tensor = as_lazy(value)
        if tensor is None or tensor.shape != piece.size:
            raise CheckpointError(f"its piece at {list(piece.offset)} holds something else")
        parts.append((piece, tensor))
    if len(parts) == 1:
        return parts[0][1]
    dtype = parts[0][1].dtype
    if any(tensor.dtype is not dtype for _, tensor in parts):
        raise CheckpointError("its pieces have different dtypes; the checkpoint is damaged")

    def load() -> Tensor:
        result = torch.empty(shape, dtype=dtype)
        for piece, tensor in parts:
            block = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
            result[block] = tensor.load()
        return result

    return LazyTensor(shape, dtype, load, in_order(shape, parts))


def in_order(shape: tuple[int, ...], parts: list[tuple[Piece, LazyTensor]]) -> Joined | None:
    """Return the bytes of a tensor if its pieces' bytes follow each other, cut along one axis.

    So it is where each rank has a block of rows; the pieces are copied as they are then.

    Args:
        shape: The whole, which the pieces cover exactly once.
        parts: Its pieces and their values.
    """
    ordered = sorted((part for part in parts if math.prod(part[0].size)), key=lambda p: p[0].offset)
    extents = [tensor.extent for _, tensor in ordered]
    axis = next((i for i, size in enumerate(shape) if ordered and ordered[0][0].size[i] < size), 0)
    rows = math.prod(shape[:axis]) == 1 and all(
        piece.size[axis + 1 :] == shape[axis + 1 :] for piece, _ in ordered
    )
    ranges = tuple(extent for extent in extents if isinstance(extent, Extent))
    return Joined(ranges) if rows and len(ranges) == len(extents) else None


def _piece(chunk: Any) -> Piece:
    attributes = chunk.attributes() if isinstance(chunk, Instance) else {}
    return Piece(sizes(attributes.get("offsets")), sizes(attributes.get("sizes")))


def check_cover(shape: tuple[int, ...], pieces: list[Piece]) -> None:
    """Refuse pieces that do not cover a shape exactly once.

    Args:
        shape: The whole.
        pieces: Its pieces.

    Raises:
        CheckpointError: A piece leaves the shape, two overlap, or something is not covered.
    """
    for piece in pieces:
        fits = len(piece.offset) == len(piece.size) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= whole
            for o, n, whole in zip(piece.offset, piece.size, shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"a piece at {list(piece.offset)} of size {list(piece.size)} leaves the shape "
                f"{list(shape)}"
            )
    full = [piece for piece in pieces if math.prod(piece.size)]
    starts = np.array([p.offset for p in full], dtype=np.int64).reshape(len(full), len(shape))
    ends = starts + np.array([p.size for p in full], dtype=np.int64).reshape(starts.shape)
    for at in range(len(full)):
        overlap = (starts[at] < ends[at + 1 :]) & (starts[at + 1 :] < ends[at])
        if overlap.all(axis=1).any():
            raise CheckpointError("two of its pieces overlap; the metadata is damaged")
    covered = sum(math.prod(piece.size) for piece in full)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"its pieces hold {covered} of {math.prod(shape)} values; a part is missing"
        )


def nested(flat: dict[str, Any], paths: dict[Any, Any]) -> dict[Any, Any]:
    """Return the tree that was flattened, from the paths that torch keeps beside it.

    Args:
        flat: Values by their flattened name.
        paths: Keys from the root to each value, by flattened name.
    """
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        path = paths.get(name)
        keys = list(path) if isinstance(path, (tuple, list)) and path else [name]
        node = tree
        for key in keys[:-1]:
            inner = node.setdefault(str(key), {})
            if not isinstance(inner, dict):
                raise CheckpointError(f"{name} lies inside another value; the metadata is damaged")
            node = inner
        node[str(keys[-1])] = value
    return tree


def _read(found: Probe, options: Options) -> Weights:
    tree, files = read_tree(found.path, options.allow)
    weights = from_tree(tree, options)
    weights.files += files
    return weights


FORMAT = Format("torch distributed checkpoint", is_dcp, _read)
