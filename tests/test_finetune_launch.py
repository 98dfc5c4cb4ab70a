"""The training run as a user starts it: several processes, some of which die."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bnconvert as bc
from tests.shapes import write_shapes

pytestmark = pytest.mark.distributed

ROUNDS = int(os.environ.get("BNCONVERT_KILL_ROUNDS", "2"))
"""Kills in one test run; set BNCONVERT_KILL_ROUNDS=10 for more."""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"))


class Run:
    """`bnconvert finetune` in a process group of its own."""

    def __init__(self, images: Path, output: Path, *more: str) -> None:
        command = [
            sys.executable, "-c", "from bnconvert.cli.main import main; main()", "finetune",
            "test_resnet", "--data", str(images), "-o", str(output), "--epochs", "8",
            "--batch-size", "4", "--img-size", "32", "--workers", "0", "--lr", "0.02", "--json",
            "--nproc", "2", "--save-every", "2", *more,
        ]  # fmt: skip
        self.output = output
        self.process = subprocess.Popen(  # noqa: S603 (our own command)
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def rank(self, number: int) -> int:
        """Return the pid of a rank, as soon as it has begun to train."""
        while self.process.poll() is None:
            for status in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):
                    words = status.read_bytes().split(b"\0")
                    parent = int((status.parent / "stat").read_text().rsplit(")")[-1].split()[1])
                    if f"RANK={number}".encode() in words and parent == self.process.pid:
                        return int(status.parent.name)
            time.sleep(0.05)
        raise AssertionError(self.end()[2])

    def wait_for_checkpoint(self) -> None:
        while not (self.output / "checkpoint.pt").exists():
            assert self.process.poll() is None, self.end()[2]
            time.sleep(0.05)

    def end(self, seconds: float = 900.0) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, out, err


def finished(run: Run) -> dict[str, Any]:
    code, out, err = run.end()
    assert code == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


@pytest.fixture(scope="session")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    return output, finished(Run(images, output))


def assert_same_result(run: Run, summary: dict[str, Any], expected: tuple[Path, Any]) -> None:
    output, undisturbed_summary = expected
    assert summary["final"] == undisturbed_summary["final"]
    one, other = bc.load_model(output).state_dict(), bc.load_model(run.output).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (output / "updates.csv").read_text() == (run.output / "updates.csv").read_text()


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_a_killed_rank_ends_the_run_by_name_and_resuming_gives_the_same_model(
    images: Path, tmp_path: Path, undisturbed: tuple[Path, Any], round_number: int
) -> None:
    chance = random.Random(round_number)  # noqa: S311 (a test)
    run = Run(images, tmp_path / "run")
    victim = round_number % 2
    pid = run.rank(victim)
    if round_number % 3:
        run.wait_for_checkpoint()
        time.sleep(chance.uniform(0.0, 1.5))
    else:
        time.sleep(chance.uniform(0.0, 4.0))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    code, out, err = run.end(60.0)
    assert time.monotonic() - killed < 60.0
    assert code == 1
    assert out == ""
    assert err.splitlines()[-1].startswith(f"error: rank {victim} was ended by SIGKILL")
    again = Run(images, tmp_path / "run", "--resume")
    assert_same_result(again, finished(again), undisturbed)


def test_ctrl_c_saves_and_resuming_gives_the_same_model(
    images: Path, tmp_path: Path, undisturbed: tuple[Path, Any]
) -> None:
    run = Run(images, tmp_path / "run", "--save-every", "1000")
    run.rank(0)
    run.wait_for_checkpoint()
    os.killpg(run.process.pid, signal.SIGINT)
    code, _, err = run.end(60.0)
    assert code == 1
    assert "--resume" in err.splitlines()[-1]
    assert "Traceback" not in err
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["progress"]["update"] > 0
    again = Run(images, tmp_path / "run", "--save-every", "1000", "--resume")
    assert_same_result(again, finished(again), undisturbed)


def test_ranks_save_and_end_when_their_launcher_is_killed(images: Path, tmp_path: Path) -> None:
    run = Run(images, tmp_path / "run", "--epochs", "1000")
    run.rank(0)
    run.wait_for_checkpoint()
    run.process.kill()
    run.end(60.0)  # reads until no process holds the pipes any more
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["progress"]["epoch"] < 999


def test_one_rank_that_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    run = Run(tmp_path / "nowhere", tmp_path / "run")
    code, out, err = run.end()
    assert (code, out) == (1, "")
    assert f"error: {tmp_path / 'nowhere'}: there is no such folder" in err
    assert "Traceback" not in err


def test_a_port_in_use_is_refused_at_once(images: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = Run(images, tmp_path / "run", "--master-port", port).end(60.0)
    assert code == 1
    assert f"--master-port: {port} cannot be used" in err
