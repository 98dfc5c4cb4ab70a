"""The folder of a run: what is refused before anything is touched, and what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bnconvert as bc
from bnconvert.errors import CheckpointError
from bnconvert.finetune.state import RunFolder
from tests.finetune_support import run_here, settings


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "run"
    run_here(settings(images, output, epochs=1))
    return output


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for name, content in contents(finished).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "/nowhere/at/all"},
        {"model": "resnet1818"},
        {"checkpoint": "/nowhere.safetensors"},
        {"num_classes": 2},
        {"opt": "nosuch"},
        {"export": "/nowhere/model.onnx"},
        {"freeze": ("nosuch*",)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_run_that_cannot_begin_leaves_the_old_one_whole(
    images: Path, run_folder: Path, changes: dict[str, Any]
) -> None:
    before = contents(run_folder)
    with pytest.raises((bc.BnconvertError, OSError)):
        run_here(settings(images, run_folder, force=True, **changes))
    assert contents(run_folder) == before


def test_a_run_that_cannot_begin_makes_no_folder(images: Path, tmp_path: Path) -> None:
    with pytest.raises(bc.BnconvertError):
        run_here(settings(images, tmp_path / "run", opt="nosuch"))
    assert not (tmp_path / "run").exists()


def test_force_starts_anew(images: Path, run_folder: Path) -> None:
    run_here(settings(images, run_folder, force=True, epochs=2, lr=0.01))
    rows = (run_folder / "updates.csv").read_text().splitlines()
    assert [row[0] for row in rows[1:]] == ["0"] * 6 + ["1"] * 6
    assert torch.load(run_folder / "checkpoint.pt")["progress"]["epoch"] == 2


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt", "config.json"])
def test_a_folder_that_holds_no_run_is_not_gone_on_with(
    images: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(bc.BnconvertError, match="holds no run to go on with"):
        run_here(settings(images, tmp_path, resume=True))
    assert contents(tmp_path) == {name: b"mine"}


def test_what_a_run_killed_before_its_first_state_leaves_is_gone_on_with(
    images: Path, run_folder: Path
) -> None:
    (run_folder / "checkpoint.pt").unlink()
    (run_folder / ".checkpoint.pt.0123.tmp").write_bytes(b"part")
    run_here(settings(images, run_folder, epochs=1, resume=True))
    assert (run_folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("option", ["export", "plot"])
def test_files_at_the_end_may_lie_in_the_folder_of_the_run(
    images: Path, tmp_path: Path, option: str
) -> None:
    path = tmp_path / "new" / "run" / {"export": "m.onnx", "plot": "curves.png"}[option]
    run_here(settings(images, path.parent, epochs=1, **{option: str(path)}))
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export": "run/checkpoint.pt"}, "--export: .*checkpoint.pt is a file of the run itself"),
        ({"export": "run/../run/config.json"}, "is a file of the run itself"),
        ({"export": "there.svg"}, "--export: .* exists; use --force"),
        ({"plot": "there.svg"}, "--plot: .* exists; use --force"),
        ({"plot": "folder.svg"}, "--plot: .* is a folder"),
        ({"plot": "missing/x.svg"}, "--plot: there is no folder"),
        ({"export": "x.svg", "plot": "y/../x.svg"}, "is also --export"),
    ],
)
def test_files_that_could_not_be_written_at_the_end_are_refused_at_the_start(
    images: Path, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    (tmp_path / "there.svg").write_text("mine")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "y").mkdir()
    paths = {option: f"{tmp_path}/{path}" for option, path in changes.items()}
    with pytest.raises(bc.BnconvertError, match=message):
        run_here(settings(images, tmp_path / "run", **paths))
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "there.svg").read_text() == "mine"


@pytest.mark.parametrize("key", ["schema", "settings", "facts", "progress", "optimizer", "scaler"])
def test_a_state_that_lacks_something_is_refused(images: Path, run_folder: Path, key: str) -> None:
    state = torch.load(run_folder / "checkpoint.pt")
    del state[key]
    torch.save(state, run_folder / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="--force"):
        run_here(settings(images, run_folder, epochs=1, resume=True))


def test_a_state_of_another_schema_is_refused(images: Path, run_folder: Path) -> None:
    state = torch.load(run_folder / "checkpoint.pt")
    torch.save({**state, "schema": 99}, run_folder / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="has the schema 99 and not 1"):
        run_here(settings(images, run_folder, epochs=1, resume=True))


def test_a_state_that_cannot_be_written_is_one_line_and_keeps_the_old_one(
    images: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    asked = ["test_resnet", "--data", str(images), "-o", str(output), "--img-size", "32"]
    command = [sys.executable, "-m", "bnconvert.finetune", *asked, "--epochs", "2"]
    script = "trap '' XFSZ; ulimit -f 200; exec \"$@\""
    ended = subprocess.run(  # noqa: S603 (our own command)
        ["/bin/sh", "-c", script, "sh", *command, "--workers", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"error: {output}/checkpoint.pt: the state cannot be written (")
    assert "Traceback" not in ended.stderr
    assert [path.name for path in output.iterdir() if path.name.endswith(".tmp")] == []


def test_an_optimizer_that_fails_in_its_step_is_named(images: Path, tmp_path: Path) -> None:
    with pytest.raises(bc.BnconvertError, match="--opt: adahessian does not step"):
        run_here(settings(images, tmp_path / "run", opt="adahessian"))


def test_the_state_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(str(tmp_path))
    folder.save({"model": torch.ones(3)})
    before = folder.checkpoint.read_bytes()
    monkeypatch.setattr(torch, "save", lambda state, path: Path(path).write_bytes(b"x") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        folder.save({"model": torch.zeros(3)})
    assert contents(tmp_path) == {"checkpoint.pt": before}
