"""Reads HDF5 files in forks of a process that has h5py imported already.

A long campaign of damaged files otherwise spends its time on starting Python. The reader, its
limits and what it says to its parent are those of `bnconvert.checkpoint.hdf5_child`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_CHILD = Path(__file__).parent.parent / "bnconvert" / "checkpoint" / "hdf5_child.py"


def main() -> None:
    """Fork a reader for each request: `path memory` and the files for its stdin and stdout."""
    import h5py  # noqa: F401 (its import is what the forks save)

    child = runpy.run_path(str(_CHILD))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended readers leave at once
    server = socket.socket(fileno=0)
    while True:
        request, files, _, _ = socket.recv_fds(server, 1 << 16, 3)
        if not request:
            return
        path, memory = request.decode().rsplit(" ", 1)
        pid = os.fork()
        if pid == 0:
            server.detach()
            for place, file in enumerate(files[:2]):
                os.dup2(file, place)
            target = f"fd:{files[2]}" if path.startswith("fd:") else path
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            child["main"](target, int(memory))
            os._exit(0)
        for file in files:
            os.close(file)
        server.sendall(f"{pid}\n".encode())


class Server:
    """A running server; `Popen` stands in for `subprocess.Popen` in `bnconvert.checkpoint.hdf5`."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        command = [sys.executable, "-I", str(Path(__file__))]
        self._process = subprocess.Popen(command, stdin=other)  # noqa: S603 (our own file)
        other.close()
        self._answers = self._socket.makefile("rb")

    @contextlib.contextmanager
    def serving(self) -> Any:
        """Let `bnconvert.checkpoint.hdf5` start its readers here."""
        from bnconvert.checkpoint import hdf5

        real: Any = hdf5.subprocess
        fake: Any = SimpleNamespace(Popen=self.start, PIPE=real.PIPE, DEVNULL=real.DEVNULL)
        vars(hdf5)["subprocess"] = fake
        try:
            yield
        finally:
            vars(hdf5)["subprocess"] = real
            self._socket.close()
            self._answers.close()
            self._process.wait(10)

    def start(self, command: list[str], pass_fds: tuple[int, ...], **options: Any) -> _Reader:
        """Start a reader, from the arguments that `subprocess.Popen` gets."""
        (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
        request = " ".join(command[-2:]).encode()
        socket.send_fds(self._socket, [request], [stdin, stdout, *pass_fds])
        for file in (stdin, stdout):
            os.close(file)
        return _Reader(int(self._answers.readline()), to_child, from_child)


class _Reader:
    """What `bnconvert.checkpoint.hdf5` uses of a process."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(1e-4)
        return 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
