"""Legacy torch files (before 1.6): four pickles, then the bytes of every storage in turn."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.layouts import holds_module
from bnconvert.checkpoint.pickle_policy import check
from bnconvert.checkpoint.pickle_reader import PickleReader
from bnconvert.checkpoint.pickle_values import Storage, bytes_of
from bnconvert.checkpoint.pickle_vm import PickleMachine
from bnconvert.checkpoint.registry import Format, Options, from_tree
from bnconvert.checkpoint.source import Extent, Memory
from bnconvert.checkpoint.torch_zip import storage_identifier
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bnconvert.checkpoint.probe import Probe
    from bnconvert.checkpoint.record import Weights

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_STARTS = tuple({pickle.dumps(MAGIC_NUMBER, p) for p in range(pickle.HIGHEST_PROTOCOL + 1)})
PROTOCOL = 1001


class LegacyStorages:
    """Resolves persistent ids to storages whose bytes are found later."""

    def __init__(self) -> None:
        self.known: dict[str, Storage] = {}
        self.views: list[tuple[Storage, Storage]] = []

    def __call__(self, identifier: Any) -> Any:
        """Return the storage, or for ("module", class, source, ...) the class's name."""
        if isinstance(identifier, tuple) and identifier[:1] == ("module",) and len(identifier) > 1:
            return identifier[1]
        key, dtype, numel = storage_identifier(identifier)
        storage = self.known.setdefault(key, Storage(key, dtype, numel))
        view = identifier[5] if len(identifier) > 5 else None
        if view is None:
            return storage
        if not isinstance(view, tuple) or len(view) != 3 or type(view[1]) is not int:
            raise CheckpointError("a view of a storage is described wrongly; the file is damaged")
        part = Storage(str(view[0]), dtype, numel, base=view[1])
        self.views.append((part, storage))
        return part


def read_pickle(block: Extent | Memory, allow: Iterable[str] = ()) -> Any:
    """Return the object of a legacy torch file.

    Args:
        block: The whole file, or one inside another.
        allow: Names of classes admitted as inert stand-ins.

    Raises:
        CheckpointError: The file is damaged or asks for what it may not.
    """
    extent = block if isinstance(block, Extent) else None
    where = str(extent.file.path) if extent else "a storage inside the pickle"
    storages = LegacyStorages()
    with _stream(block) as stream:
        reader = PickleReader(stream, block.nbytes, extent)
        header = [PickleMachine(reader).run() for _ in range(3)]
        if header[:2] != [MAGIC_NUMBER, PROTOCOL] or not isinstance(header[2], dict):
            raise CheckpointError(f"{where}: is a torch file of an unknown version")
        machine = PickleMachine(reader, storages, allow)
        value = machine.run()
        check(machine, where, holds_module, value)
        keys = PickleMachine(reader).run()
    big_endian = header[2].get("little_endian") is False
    _place(storages, keys, block, where, reader.position, big_endian)
    return value


def load_bytes(args: Any) -> Storage:
    """Return the storage that plain `pickle` wrote as a torch file inside itself."""
    block = bytes_of(args[0]) if len(args) == 1 else None
    storage = read_pickle(block) if isinstance(block, (Extent, Memory)) else None
    if not isinstance(storage, Storage):
        raise CheckpointError("a storage inside the pickle is not one; the file is damaged")
    return storage


def _stream(block: Extent | Memory) -> io.BufferedIOBase:
    if isinstance(block, Memory):
        return io.BytesIO(block.data)
    stream = block.file.open()
    stream.seek(block.offset)
    return stream


def _place(
    storages: LegacyStorages,
    keys: Any,
    extent: Extent | Memory,
    where: str,
    position: int,
    big_endian: bool,
) -> None:
    """Give every storage its bytes; they follow each other, each after its length."""
    if not isinstance(keys, list) or len(set(map(str, keys))) != len(keys):
        raise CheckpointError(f"{where}: lists its storages wrongly; the file is damaged")
    for key in keys:
        storage = storages.known.get(key) if isinstance(key, str) else None
        if storage is None:
            raise CheckpointError(f"{where}: lists a storage that nothing uses; it is damaged")
        length = extent.part(position, 8, f"storage {key!r}").read()
        numel = int.from_bytes(length, "big" if big_endian else "little", signed=True)
        if numel != storage.numel:
            raise CheckpointError(
                f"{where}: storage {key!r} should have {storage.numel} values but says {numel}; "
                "the file is damaged"
            )
        nbytes = numel * storage.dtype.itemsize
        storage.segment = extent.part(position + 8, nbytes, f"storage {key!r}")
        storage.big_endian = big_endian
        position += 8 + nbytes
    for part, storage in storages.views:
        part.segment, part.big_endian = storage.segment, big_endian


def _read(found: Probe, options: Options) -> Weights:
    weights = from_tree(read_pickle(found.source.extent(), options.allow), options)
    weights.notes.append("a legacy torch file (before 1.6); read tensor by tensor all the same")
    return weights


FORMAT = Format("torch legacy", lambda found: found.head.startswith(_STARTS), _read)
