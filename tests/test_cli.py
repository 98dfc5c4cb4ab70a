"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from bnconvert.cli.main import COMMANDS, group, main

ROOT = Path(__file__).parent.parent
SMALL = "mobilenetv3_small_050"


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command as the shell does, in this process."""

    def invoke(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["bnconvert", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, *capsys.readouterr())

    return invoke


def commands() -> dict[str, click.Command]:
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in COMMANDS}
    return {name: command for name, command in found.items() if command is not None}


def test_every_command_and_option_has_help_and_is_in_the_documentation() -> None:
    assert set(commands()) == set(COMMANDS)
    documentation = (ROOT / "README.md").read_text() + "".join(
        path.read_text() for path in (ROOT / "docs").glob("*.md")
    )
    for name, command in commands().items():
        assert command.help, name
        assert f"bnconvert {name}" in documentation, f"{name} is not in README or docs"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"


def test_the_main_commands_in_sequence(tmp_path: Path, run: Run) -> None:
    sync, plain = tmp_path / "sync", tmp_path / "plain"
    done = run("convert", SMALL, "-o", sync, "--strict", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["counts"] == {"converted": 34}
    listed = json.loads(run("inspect", sync, "--json").stdout)
    assert {layer["group"] for layer in listed["layers"]} == {"default group"}
    done = run("revert", sync, "-o", plain)
    assert done.returncode == 0
    assert done.stdout.startswith("revert: 34 reverted\n")
    done = run("compare", sync, plain, "--json")
    assert done.returncode == 0
    assert run("export", plain, "-o", tmp_path / "model.onnx").returncode == 0
    assert (tmp_path / "model.onnx").is_file()


@pytest.mark.filterwarnings("always:exclude")
def test_dry_run_writes_nothing_and_strict_tells_what_is_left(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "out"
    done = run(
        "convert",
        SMALL,
        "-o",
        target,
        "--exclude",
        "bn1",
        "--dry-run",
        "--strict",
        "--exclude",
        "bm2",
    )
    assert done.returncode == 3
    assert "warning: exclude: 'bm2' matches none of the 34 BatchNorm layers" in done.stderr
    assert "it is excluded by 'bn1'" in done.stdout
    assert "--strict: 1 layers were left" in done.stderr
    assert not target.exists()


def test_bad_input_is_one_line_on_stderr_and_exit_code_1_or_2(tmp_path: Path, run: Run) -> None:
    (tmp_path / "damaged.pth").write_bytes(b"not a checkpoint")
    cases: list[tuple[int, str, tuple[str | Path, ...]]] = [
        (1, "did you mean resnet50", ("inspect", "resnet5")),
        (1, "damaged.pth", ("inspect", SMALL, "--checkpoint", tmp_path / "damaged.pth")),
        (1, "missing.pth", ("inspect", SMALL, "--checkpoint", tmp_path / "missing.pth")),
        (1, "exists", ("convert", SMALL, "-o", tmp_path)),
        (1, "no such folder", ("convert", SMALL, "-o", tmp_path / "a" / "b")),
        (1, "there is no", ("export", SMALL, "-o", tmp_path / "a" / "b.onnx")),
        (2, "Missing option", ("convert", SMALL)),
        (2, "No such command", ("converter",)),
    ]
    for code, text, arguments in cases:
        done = run(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert text in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        if code == 1:
            assert done.stderr.startswith("error: ")
            assert len(done.stderr.splitlines()) == 1


def test_a_callable_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.BatchNorm2d(3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "bnconvert", "inspect", "mine:build"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 BatchNorm layers")


def test_what_a_model_prints_does_not_end_up_in_the_result(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talking.py").write_text(
        "from torch import nn\n\nprint('import')\n\n\nclass Talking(nn.BatchNorm2d):\n"
        "    def _check_input_dim(self, x):\n        print('forward')\n\n\n"
        "def build():\n    print('build')\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 1), Talking(4))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for command in (
        ["inspect", "talking:build"],
        ["compare", "talking:build", "talking:build", "--input-size", "3x8x8"],
    ):
        done = run(*command, "--json")
        assert json.loads(done.stdout), done
        assert "build" in done.stderr


def test_doctor_says_which_kernels_would_run(run: Run) -> None:
    done = run("doctor", "--json")
    facts = json.loads(done.stdout)
    assert facts["kernels for CPU"]
    assert facts["kernels for CUDA"]
    assert "torch" in facts
    assert "NCCL" in facts
