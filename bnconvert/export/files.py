"""Write the files of an export together or not at all.

They are written into a temporary folder beside their destination, loaded and proven there, synced,
and moved into place; the model last, so that it never points to weights that are not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST_SINGLE_FILE = 2_000_000_000
"""Bytes of weights up to which a model is one file; protobuf itself ends at 2**31 - 1."""


def check_destination(path: Path, overwrite: bool) -> None:
    """Refuse a destination that cannot be written, before any work is done.

    Raises:
        BnconvertError: The file exists and `overwrite` is not set, or its folder does not take it.
    """
    if path.is_dir():
        raise BnconvertError(f"{path}: is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise BnconvertError(f"{path}: is a device or pipe, not a file; give the name of a file")
    if path.exists() and not overwrite:
        raise BnconvertError(f"{path}: exists; pass overwrite=True (--force) to replace it")
    if not path.parent.is_dir():
        raise BnconvertError(f"{path}: there is no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BnconvertError(f"{path}: the folder {path.parent} is not writable; choose another")


@contextlib.contextmanager
def staged(path: Path, overwrite: bool, *, keep: bool = True) -> Iterator[Path]:
    """Yield where to write the model; move it and its companions into place at the end.

    Every other file in the folder of the yielded path is moved along. When the body raises, nothing
    is left behind.

    Args:
        path: Where the model goes.
        overwrite: Replace existing files.
        keep: Whether to move anything into place; without, the body is only tried.

    Raises:
        BnconvertError: See `check_destination`.
    """
    if keep:
        check_destination(path, overwrite)
    parent = path.parent if keep else None
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=parent))
    try:
        yield folder / path.name
        if not keep:
            return
        companions = sorted(p for p in folder.iterdir() if p.name != path.name)
        for companion in companions:
            check_destination(path.parent / companion.name, overwrite)
        for file in (*companions, folder / path.name):
            _sync(file)
        check_destination(path, overwrite)
        for file in (*companions, folder / path.name):
            file.replace(path.parent / file.name)
        _sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_graph(graph: ir.Model, path: Path, external_data: bool | Literal["auto"]) -> None:
    """Write a graph as one file, or as two with the weights in `<path>.data`.

    Args:
        graph: The graph.
        path: The model file.
        external_data: Whether to write two files; "auto" does so for more than 2 GB of weights.

    Raises:
        BnconvertError: One file is asked for, and it would be larger than the format allows.
    """
    size = sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value)
    if external_data is False and size > LARGEST_SINGLE_FILE:
        raise BnconvertError(
            f"external_data: the weights take {size:,} bytes but one ONNX file holds less than "
            "2 GB; leave external_data at its default"
        )
    if external_data is True or size > LARGEST_SINGLE_FILE:
        ir.save(graph, path, external_data=f"{path.name}.data")
    else:
        ir.save(ir.external_data.load_to_model(graph), path)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, a file with the mode that new files get."""
    if path.is_file():
        umask = os.umask(0)
        os.umask(umask)
        path.chmod(0o666 & ~umask)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
