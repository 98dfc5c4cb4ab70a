"""Files that are cut, overlap or lie about themselves are refused in a sentence."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from bnconvert.checkpoint import load_checkpoint
from bnconvert.errors import CheckpointError
from tests.checkpoint_support import STATE, make_specimens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def torch_zip(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    torch.save(STATE, path)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as new:
        for name, data in members.items():
            new.writestr(name, data)
    return path


def test_storages_that_are_short_missing_or_overrun_are_refused(tmp_path: Path) -> None:
    def short(members: dict[str, bytes]) -> None:
        members["a/data/0"] = members["a/data/0"][:-1]

    def missing(members: dict[str, bytes]) -> None:
        del members["a/data/1"]

    def huge(members: dict[str, bytes]) -> None:
        members["a/data.pkl"] = members["a/data.pkl"].replace(
            b"K\x03\x85", b"J\xff\xff\xff\x7f\x85", 1
        )

    for name, change in {"short": short, "missing": missing, "huge": huge}.items():
        (tmp_path / name).mkdir()
        path = torch_zip(tmp_path / name / "a.pt", change)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)


def test_zip_bombs_overlaps_and_repeated_members_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 26,)}
        )
        with archive.open("a.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            for _ in range(256):
                member.write(bytes(1 << 20))
    with pytest.raises(CheckpointError, match="zip bomb"):
        load_checkpoint(tmp_path / "bomb.npz")
    torch.save(STATE, tmp_path / "twice.pt")
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(tmp_path / "twice.pt", "a") as archive,
    ):
        archive.writestr("twice/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match="one name"):
        load_checkpoint(tmp_path / "twice.pt")
    content = bytearray((tmp_path / "twice.pt").read_bytes())
    at = content.rfind(b"PK\x01\x02")
    content[at + 42 : at + 46] = struct.pack("<I", 0)
    (tmp_path / "overlap.pt").write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"overlap|one name"):
        load_checkpoint(tmp_path / "overlap.pt")


def header(entries: dict[str, Any] | str, data: bytes = b"\0" * 16) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        header({"a": entry(0, 8, [2]), "b": entry(4, 16, [3])}),
        header({"a": entry(0, 8, [2]), "b": entry(0, 16, [4])}),
        header({"a": entry(0, 8, [2])}),
        header({"a": entry(0, 32, [8])}),
        header({"a": entry(0, 2**63, [2**61])}),
        header({"a": entry(0, 16, [2**62, 4])}),
        header({"a": entry(0, 16, [-4, -1])}),
        header({"a": entry(16, 0, [4])}),
        header({"a": entry(0, 16, [4.0])}),
        header({"a": entry(0, 16, [True, 4])}),
        header({"a": entry(0, 16, [4], "F4")}),
        header({"a": entry(0, 16, [4], None)}),  # type: ignore[arg-type]
        header({"a": 3}),
        header({"__metadata__": {"x": 1}, "a": entry(0, 16, [4])}),
        header(
            '{"a":' + json.dumps(entry(0, 16, [4])) + ',"a":' + json.dumps(entry(0, 16, [4])) + "}"
        ),
        header('{"a":' * 100_000),
        header("{" + " " * 50, b""),
        (2**63).to_bytes(8, "little") + b"{" + b" " * 20,
        (1 << 40).to_bytes(8, "little") + b"{" + b" " * 20,
        header('{"\\ud800": 1}'),
    ],
    ids=range(20),
)
def test_damaged_safetensors_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "e.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"e\.safetensors"):
        load_checkpoint(tmp_path / "e.safetensors")


def test_every_truncation_is_an_error_or_loses_nothing(tmp_path: Path) -> None:
    for name, path in make_specimens(tmp_path).items():
        content = path.read_bytes()
        expected = dict(load_checkpoint(path).tensors)
        step = max(1, len(content) // (6 if name == "h" else 60))
        for length in range(0, len(content), step):
            cut = tmp_path / f"cut{path.suffix}"
            cut.write_bytes(content[:length])
            try:
                loaded = dict(load_checkpoint(cut).tensors)
            except CheckpointError as error:
                assert "cut" in str(error)  # noqa: PT017 (either outcome is right)
                continue
            assert loaded.keys() == expected.keys(), (name, length)
            assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_an_archive_without_members_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.pth"
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:100] + b"PK\5\6" + bytes(18))
    with pytest.raises(CheckpointError, match=r"e\.pth"):
        load_checkpoint(path)


def test_wrong_kinds_of_file_and_link_loops_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.pt")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to("model.safetensors")
    (tmp_path / "m2").mkdir()
    (tmp_path / "m2" / "latest").write_text("../../etc")
    for name in ("fifo.pt", "loop.pt", "m", "m2", "/dev/zero", "nul\0byte"):
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / name)
