"""Checkpoint files are written whole or not at all, in bounded memory."""

from __future__ import annotations

import errno
import gc
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import bnconvert.checkpoint.copying as copying
import bnconvert.checkpoint.zip_writer as zip_writer
from bnconvert.checkpoint import (
    convert_checkpoint,
    save_checkpoint,
)
from bnconvert.errors import BnconvertError, CheckpointError, VerificationError
from tests.checkpoint_support import KINDS, assert_bits, net


def test_existing_outputs_and_the_input_itself_are_refused(tmp_path: Path) -> None:
    source, other = tmp_path / "w.pth", tmp_path / "o.pth"
    torch.save(net().state_dict(), source)
    before = source.read_bytes()
    other.write_text("kept")
    with pytest.raises(CheckpointError, match="--force"):
        convert_checkpoint(source, other)
    assert other.read_text() == "kept"
    convert_checkpoint(source, other, overwrite=True)
    (tmp_path / "soft.pth").symlink_to(source)
    os.link(source, tmp_path / "hard.pth")
    for output in (source, tmp_path / "soft.pth", tmp_path / "hard.pth"):
        with pytest.raises(CheckpointError, match="input itself"):
            convert_checkpoint(source, output, overwrite=True)
    assert source.read_bytes() == before


def test_devices_and_pipes_are_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "p.pth"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path / "link.pth"):
        if target is not pipe:
            target.symlink_to(pipe)
        with pytest.raises(CheckpointError, match="device or pipe"):
            save_checkpoint(net().state_dict(), target, overwrite=True)
    assert pipe.is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_file_mode_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save_checkpoint(net().state_dict(), tmp_path / "w.safetensors")
        save_checkpoint(net().state_dict(), tmp_path / "w")
    finally:
        os.umask(old)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o640
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "w").iterdir()} == {0o640}


@pytest.mark.parametrize("name", KINDS.values())
def test_a_full_disk_leaves_nothing_and_the_old_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / name
    if target.suffix:
        target.write_text("old")

    def full(self: object, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(copying.FileOutput, "write", full)
    with pytest.raises(CheckpointError, match=f"{name}: No space left"):
        save_checkpoint(net().state_dict(), target, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ([name] if target.suffix else [])
    assert not target.suffix or target.read_text() == "old"


@pytest.mark.parametrize("name", KINDS.values())
def test_a_disk_that_fails_behind_the_writing_leaves_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(copying, "_flush", broken)
    monkeypatch.setattr(copying, "FLUSH_EVERY", 200)
    with pytest.raises(CheckpointError, match=f"{name}: Input/output error"):
        save_checkpoint(net().state_dict(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", KINDS.values())
def test_a_result_that_reads_back_differently_is_not_kept(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = copying.FileOutput.write
    state = {"0.weight": torch.full((2000,), 7.0)}

    def flipped(self: Any, data: memoryview) -> None:
        damaged = bytearray(data)
        if len(damaged) == 8000:
            damaged[100] ^= 1
        genuine(self, memoryview(damaged))

    monkeypatch.setattr(copying.FileOutput, "write", flipped)
    with pytest.raises(BnconvertError) as caught:
        save_checkpoint(state, tmp_path / name)
    assert isinstance(caught.value, (VerificationError, CheckpointError))
    assert list(tmp_path.iterdir()) == []


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.parametrize("zipped", [True, False])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, zipped: bool) -> None:
    count, tensors = 1 << 20, 60
    state = {f"t{i}": torch.full((count,), float(i)) for i in range(tensors)}
    torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    del state
    gc.collect()
    peak = 0
    before = anonymous()
    genuine = copying.FileOutput.write

    def sampled(self: Any, data: memoryview) -> None:
        nonlocal peak
        peak = max(peak, anonymous())
        genuine(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying.FileOutput, "write", sampled)
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors", dtype="fp16")
    assert peak - before < 2 * 4 * count + (100 << 20)  # of a file of 252 MB


def test_files_beyond_32_bits_are_written_as_torch_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zip_writer, "LARGE_FROM", 100)
    state = {"a": torch.randn(50), "b": torch.arange(3), "c": torch.randn(60)}
    save_checkpoint(state, tmp_path / "w.pth")
    assert_bits(torch.load(tmp_path / "w.pth", weights_only=True), state)
    with zipfile.ZipFile(tmp_path / "w.pth") as archive:
        assert archive.testzip() is None
        assert len(archive.infolist()) == 7
