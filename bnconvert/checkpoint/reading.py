"""`load_checkpoint`: recognise, read the description, choose the weights, clean the names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bnconvert.checkpoint import names
from bnconvert.checkpoint.formats import read_path
from bnconvert.checkpoint.record import Checkpoint, Weights
from bnconvert.checkpoint.tensors import LazyTensors
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    weights: str = "auto",
    prefix: str = "auto",
    allow_globals: Iterable[str] = (),
) -> Checkpoint:
    """Open a file or folder of weights; no tensor is read until it is asked for.

    The format is recognised by the bytes, and nothing in the file is ever run.

    Args:
        path: A file, a folder or an index file.
        weights: Which weights of a training checkpoint: "raw", "ema" (an error where there are
            none), or "auto", the average where there is one; a note says what was chosen.
        prefix: "auto" removes the names that wrappers add (`module.`, `_orig_mod.` and FSDP's)
            anywhere, unless two tensors would then have one name; "" changes no name; anything
            else is removed where a name begins with it.
        allow_globals: Qualified names of classes that a pickle may mention outside of pickled
            modules; they become inert stand-ins, never objects.

    Raises:
        CheckpointError: The file is damaged, refused or of an unknown kind; the text names it.
    """
    if weights not in ("auto", "raw", "ema"):
        raise CheckpointError(f"weights is {weights!r}; choose 'auto', 'raw' or 'ema'")
    path = Path(path)
    try:
        found = read_path(path, weights, tuple(allow_globals))
        _refuse_empty(found)
        _note_part(found, path)
        _rename(found, prefix)
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return Checkpoint(
        path=path,
        tensors=LazyTensors(found.tensors),
        format=found.format,
        layout=found.layout,
        bn=found.bn,
        notes=tuple(found.notes),
        versions=found.versions,
        architecture=found.architecture,
        files=tuple(found.files),
    )


_PART = re.compile(r"-(\d{5})-of-(\d{5})\.")


def _refuse_empty(found: Weights) -> None:
    if not found.tensors:
        raise CheckpointError("; ".join(["holds no tensors by name", *found.notes]))


def _note_part(found: Weights, path: Path) -> None:
    part = _PART.search(path.name)
    if part is not None and int(part[2]) > 1:
        found.notes.append(
            f"by its name ({part[0].strip('-.')}) this is a part of the weights; name the index or "
            "the folder to read all"
        )


def _rename(found: Weights, prefix: str) -> None:
    if not prefix:
        return
    before = list(found.tensors)
    if prefix == "auto":
        found.tensors, note = names.strip_wrappers(found.tensors)
    else:
        found.tensors, note = names.strip_prefix(found.tensors, prefix)
    if note:
        found.notes.append(note)
    if list(found.tensors) == before:
        return

    def renamed(layer: str) -> str:
        if prefix == "auto":
            return names.without_wrappers(f"{layer}.x").rpartition(".")[0]
        return f"{layer}.".removeprefix(prefix).removesuffix(".")

    found.bn = {renamed(layer): facts for layer, facts in found.bn.items()}
    found.versions = {renamed(layer): entry for layer, entry in found.versions.items()}
