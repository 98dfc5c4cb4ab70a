"""Formats that are recognised and not read, each with the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.checkpoint.protobuf import BYTES, fields
from bnconvert.checkpoint.registry import Format, Options
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bnconvert.checkpoint.probe import Probe
    from bnconvert.checkpoint.record import Weights


def _starts(*magic: bytes) -> Callable[[Probe], bool]:
    return lambda found: found.head.startswith(magic)


def _at(offset: int, magic: bytes) -> Callable[[Probe], bool]:
    return lambda found: found.head[offset : offset + len(magic)] == magic


def _is_html(found: Probe) -> bool:
    start = found.head.lstrip()[:200].lower()
    return start.startswith((b"<!doctype html", b"<html"))


def _is_old_torch(found: Probe) -> bool:
    if found.head[257:262] != b"ustar":
        return False
    first = found.head[:100].rstrip(b"\0").decode("latin1").removeprefix("./").rstrip("/")
    return first in ("sys_info", "pickle", "storages", "tensors")


def _is_caffe(found: Probe) -> bool:
    """Recognise a NetParameter: a name, then layers in field 2 (old) or 100."""
    if found.file is None or not found.head.startswith(b"\x0a"):
        return False
    try:
        for count, (number, wire, _) in enumerate(fields(found.file.extent())):
            if number in (2, 100) and wire == BYTES:
                return True
            if count > 20:
                return False
    except CheckpointError:
        return False
    return False


def _is_paddle(found: Probe) -> bool:
    """Recognise a LoDTensor record, which begins with zeros as much else does, by suffix too."""
    return found.head.startswith(b"\0" * 8) and found.path.suffix == ".pdiparams"


UNREADABLE = (
    (
        "torch tar file of before 0.1.10",
        _is_old_torch,
        "load it with torch.load and save it again",
    ),
    (
        "tar archive",
        _at(257, b"ustar"),
        "unpack it and name the file of weights inside",
    ),
    (
        "MXNet parameters",
        _starts(b"\x12\x01\x00\x00\x00\x00\x00\x00"),
        "load them with MXNet and save the arrays as .npz",
    ),
    ("Caffe model", _is_caffe, "export it to ONNX, or save its blobs as .npz"),
    (
        "Paddle inference parameters",
        _is_paddle,
        "export the model to ONNX with paddle2onnx",
    ),
    ("TensorFlow Lite model", _at(4, b"TFL3"), "convert the model it was made from"),
    ("GGUF file", _starts(b"GGUF"), "convert the checkpoint it was made from"),
    ("MATLAB file", _starts(b"MATLAB 5.0 MAT-file"), "save its arrays as .npz"),
    ("TorchScript for mobile", _at(4, b"PTMF"), "convert the model it was made from"),
    ("ExecuTorch program", _at(4, b"ET12"), "convert the model it was made from"),
    ("gzip archive", _starts(b"\x1f\x8b"), "unpack it first"),
    ("xz archive", _starts(b"\xfd7zXZ\x00"), "unpack it first"),
    ("bzip2 archive", _starts(b"BZh"), "unpack it first"),
    ("7z archive", _starts(b"7z\xbc\xaf\x27\x1c"), "unpack it first"),
    ("Zstandard archive", _starts(b"\x28\xb5\x2f\xfd"), "unpack it first"),
    (
        "Git LFS pointer, not the file itself",
        _starts(b"version https://git-lfs"),
        "run `git lfs pull`",
    ),
    ("web page, not a checkpoint", _is_html, "the download went wrong, fetch it again"),
)
"""Name, test and way out."""


def _refuse(name: str, advice: str) -> Callable[[Probe, Options], Weights]:
    def read(found: Probe, options: Options) -> Weights:
        raise CheckpointError(f"{found.path}: is a {name}, which cannot be read; {advice}")

    return read


FORMATS = tuple(Format(name, matches, _refuse(name, way)) for name, matches, way in UNREADABLE)
