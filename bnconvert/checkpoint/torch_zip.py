"""torch zip files (`torch.save` since 1.6): `data.pkl` and one stored member per storage.

TorchScript archives are the same container with a program beside the data. Only their `data.pkl`
is read here: `torch.jit.load` would run what the file says.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import metadata, torchscript
from bnconvert.checkpoint.archive import Archive
from bnconvert.checkpoint.layouts import holds_module
from bnconvert.checkpoint.pickle_calls import STORAGE_TYPES
from bnconvert.checkpoint.pickle_policy import check
from bnconvert.checkpoint.pickle_reader import PickleReader
from bnconvert.checkpoint.pickle_values import Global, Instance, Storage
from bnconvert.checkpoint.pickle_vm import PickleMachine
from bnconvert.checkpoint.registry import Format, Options, from_tree, only_raw
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bnconvert.checkpoint.probe import Probe
    from bnconvert.checkpoint.record import Weights
    from bnconvert.checkpoint.source import Extent


class Storages:
    """Resolves the persistent ids of one archive to storages, each once.

    Args:
        archive: The archive.
        folder: Prefix of the members that hold the bytes.
        big_endian: How they are stored.
    """

    def __init__(self, archive: Archive, folder: str, big_endian: bool) -> None:
        self.archive = archive
        self.folder = folder
        self.big_endian = big_endian
        self.known: dict[str, Storage] = {}

    def __call__(self, identifier: Any) -> Storage:
        """Return the storage that a persistent id names."""
        key, dtype, numel = storage_identifier(identifier)
        storage = self.known.get(key)
        if storage is None:
            segment = self.archive.segment(self.folder + key)
            if segment.nbytes < numel * dtype.itemsize:
                raise CheckpointError(
                    f"{self.archive.where}: storage {key!r} has {segment.nbytes} bytes for "
                    f"{numel} values; the file is damaged"
                )
            storage = Storage(key, dtype, numel, segment, self.big_endian)
            self.known[key] = storage
        if storage.dtype is not dtype:
            return Storage(key, dtype, numel, storage.segment, self.big_endian)
        return storage


def storage_identifier(identifier: Any) -> tuple[str, Any, int]:
    """Return key, dtype and number of values from torch's persistent id of a storage."""
    if not isinstance(identifier, tuple) or len(identifier) < 5 or identifier[0] != "storage":
        raise CheckpointError("a storage is named in a way that torch never does; it is damaged")
    kind, key, numel = identifier[1], identifier[2], identifier[4]
    dtype = STORAGE_TYPES.get(kind.name) if isinstance(kind, Global) else None
    if dtype is None or type(numel) is not int or numel < 0 or not isinstance(key, str):
        raise CheckpointError("a storage has no type, key or size; the file is damaged")
    return key, dtype, numel


def root_of(archive: Archive) -> str | None:
    """Return the folder inside the archive that holds `data.pkl`, with its slash."""
    for name in archive.names():
        if name == "data.pkl" or (name.endswith("/data.pkl") and name.count("/") == 1):
            return name.removesuffix("data.pkl")
    return None


def read_pickle(extent: Extent, allow: Iterable[str] = ()) -> tuple[Any, str]:
    """Return the object of a torch zip file, and "torch zip" or "TorchScript".

    Args:
        extent: The archive.
        allow: Names of classes admitted as inert stand-ins.

    Raises:
        CheckpointError: The file is damaged or asks for what it may not.
    """
    archive = Archive(extent)
    root = root_of(archive)
    if root is None:
        raise CheckpointError(f"{archive.where}: has no data.pkl; it is no torch file")
    script = any(name.startswith(root + "code/") for name in archive.names())
    order = archive.read(root + "byteorder", 64) if root + "byteorder" in archive else b"little"
    storages = Storages(archive, root + "data/", order.strip() == b"big")
    data = archive.read(root + "data.pkl")
    reader = PickleReader(io.BytesIO(data), len(data))
    machine = PickleMachine(reader, storages, allow)
    value = machine.run()
    check(machine, archive.where, _is_script_object if script else holds_module, value)
    return value, "TorchScript" if script else "torch zip"


def _is_script_object(value: Any) -> bool:
    return getattr(value, "type", "").startswith("__torch__")


def _read(found: Probe, options: Options) -> Weights:
    tree, kind = read_pickle(found.source.extent(), options.allow)
    if kind == "TorchScript" and isinstance(tree, Instance) and found.archive is not None:
        weights = only_raw(torchscript.weights_of(tree, found.archive), options)
        weights.format = kind
        return weights
    weights = from_tree(tree, options, kind)
    if found.archive is not None and found.zip_has(metadata.ZIP_MEMBER):
        metadata.read_member(weights, found.archive)
    return weights


FORMAT = Format("torch zip", lambda found: found.zip_has("data.pkl"), _read)
