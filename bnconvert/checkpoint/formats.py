"""The registry of readable formats, and of those that are only recognised.

A format is a name, a test on the first bytes, and a reader. The first whose test holds reads the
file. To add one, write its reader in a file of its own and enter it here; the tests and
`docs/checkpoints.md` have one row for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import (
    folder,
    metadata,
    safetensors_file,
    sharded,
    torch_legacy,
    torch_zip,
)
from bnconvert.checkpoint.layouts import choose
from bnconvert.checkpoint.probe import Options, Probe, probe
from bnconvert.checkpoint.record import Weights
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Format:
    """One container of weights.

    Attributes:
        name: As shown to the user.
        matches: Whether a path is of this format, from its bytes.
        read: Returns the weights in it.
    """

    name: str
    matches: Callable[[Probe], bool]
    read: Callable[[Probe, Options], Weights]


def read_path(path: Path, options: Options) -> Weights:
    """Return the weights in a file or folder of any readable format."""
    found = probe(path)
    format_ = next((f for f in FORMATS if f.matches(found)), None)
    if format_ is None:
        raise CheckpointError(f"{path}: is of no known format")
    weights = format_.read(found, options)
    weights.format = weights.format or format_.name
    if found.file is not None and found.file not in weights.files:
        weights.files.insert(0, found.file)
    return weights


def from_tree(tree: Any, options: Options, format_name: str = "") -> Weights:
    """Return the weights that a layout finds in an object."""
    weights = choose(tree, options.weights)
    weights.format = format_name
    return weights


def _safetensors(found: Probe, options: Options) -> Weights:
    tensors, texts = safetensors_file.read_header(found.source)
    weights = Weights(tensors)
    metadata.read(weights, texts)
    if options.weights == "ema":
        raise CheckpointError("holds one set of weights and no EMA; ask for raw or auto")
    return weights


def _torch_zip(found: Probe, options: Options) -> Weights:
    tree, kind = torch_zip.read_pickle(found.source.extent(), options.allow)
    weights = from_tree(tree, options, kind)
    if found.archive is not None and found.zip_has(metadata.ZIP_MEMBER):
        metadata.read_member(weights, found.archive)
    return weights


def _torch_legacy(found: Probe, options: Options) -> Weights:
    tree = torch_legacy.read_pickle(found.source.extent(), options.allow)
    return from_tree(tree, options)


def _sharded(found: Probe, options: Options) -> Weights:
    return sharded.read_index(found, lambda path: read_path(path, options))


def _is_safetensors(found: Probe) -> bool:
    return found.file is not None and (
        safetensors_file.header_length(found.head, found.file.size) is not None
    )


def _folder(found: Probe, options: Options) -> Weights:
    file, note = folder.weights_in(found.path)
    weights = read_path(file, options)
    weights.notes.insert(0, note)
    weights.architecture = weights.architecture or metadata.architecture_of(file.parent)
    return weights


FORMATS: list[Format] = [
    Format("folder", lambda found: found.is_folder, _folder),
    Format("torch zip", lambda found: found.zip_has("data.pkl"), _torch_zip),
    Format("torch legacy", lambda found: found.head.startswith(torch_legacy.MAGIC), _torch_legacy),
    Format("sharded", sharded.is_index, _sharded),
    Format("safetensors", _is_safetensors, _safetensors),
]
