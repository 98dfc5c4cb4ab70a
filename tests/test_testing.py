"""The helper that the tests of several ranks run in."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from bnconvert.testing import run_ranks
from tests.test_testing import hold
run_ranks(hold, 2, sys.argv[1])
"""


def hold(rank: int, pipe: str) -> None:
    with Path(pipe).open("wb", buffering=0) as file:
        file.write(b"started\n")
        time.sleep(100)


def test_ranks_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-c", PROGRAM, str(pipe)]
    parent = subprocess.Popen(command, cwd=ROOT)  # noqa: S603 (our own program)
    seen = b""
    try:
        while seen.count(b"started") < 2:
            assert select.select([reader], [], [], 60)[0]
            seen += os.read(reader, 100)
            assert parent.poll() is None
            time.sleep(0.05)  # without a writer, the pipe counts as ended
    finally:
        parent.kill()
        parent.wait()
    # A pipe ends when no process holds it any more.
    assert select.select([reader], [], [], 30)[0]
    assert os.read(reader, 100) == b""
    os.close(reader)
