"""The registry of readable formats, and of those that are only recognised.

The first format whose test holds reads a path. To add one, write its reader in a file of its own
with a `FORMAT` at the end and enter it here; the tests and `docs/checkpoints.md` have one row for
each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.checkpoint import (
    dcp,
    flax,
    folder,
    keras,
    npz,
    onnx_file,
    pickle_file,
    pt2,
    safetensors_file,
    sharded,
    tensorflow,
    torch_legacy,
    torch_zip,
    unreadable,
)
from bnconvert.checkpoint.probe import probe
from bnconvert.checkpoint.registry import Format, Options
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.checkpoint.record import Weights

FORMATS: tuple[Format, ...] = (
    dcp.FORMAT,
    folder.FORMAT,
    pt2.FORMAT,
    torch_zip.FORMAT,
    torch_legacy.FORMAT,
    sharded.FORMAT,
    safetensors_file.FORMAT,
    keras.FORMAT,
    npz.FORMAT,
    tensorflow.FORMAT,
    flax.FORMAT,
    *unreadable.FORMATS,
    pickle_file.FORMAT,
    onnx_file.FORMAT,
)


def read_path(path: Path, weights: str, allow: tuple[str, ...]) -> Weights:
    """Return the weights in a file or folder of any readable format.

    Args:
        path: File, folder or index.
        weights: "auto", "raw" or "ema".
        allow: Names of classes admitted as inert stand-ins.

    Raises:
        CheckpointError: It is of no known format, or its reader refuses it.
    """
    found = probe(path)
    format_ = next((f for f in FORMATS if f.matches(found)), None)
    if format_ is None:
        raise CheckpointError(
            f"{path}: is of no known format; the first bytes are {found.head[:8]!r}"
        )
    options = Options(weights, allow, lambda inner: read_path(inner, weights, allow))
    result = format_.read(found, options)
    result.format = result.format or format_.name
    if found.file is not None and found.file not in result.files:
        result.files.insert(0, found.file)
    return result
