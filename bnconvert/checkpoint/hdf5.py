"""HDF5 files, read through a child process with a deadline."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import select
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint.pickle_values import numpy_dtype
from bnconvert.checkpoint.tensors import LazyTensor, as_dtype
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SIGNATURE = b"\x89HDF\r\n\x1a\n"
DEADLINE = 10.0
"""Seconds without any answer after which the child is ended."""

MEMORY = 4 << 30
MAX_LISTING = 1 << 28
_CHILD = Path(__file__).with_name("hdf5_child.py")


@dataclass(frozen=True)
class Listing:
    """What a file holds: datasets by path with shape and type, and attributes of groups."""

    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)


class Hdf5File:
    """An HDF5 file that a child process has open.

    Args:
        path: The file.
        where: What to call it in messages.
        descriptor: An open file to read instead of `path`; kept open here until the child ends.

    Raises:
        CheckpointError: h5py is missing, or the file is damaged.
    """

    def __init__(self, path: Path, where: str, descriptor: int | None = None) -> None:
        if importlib.util.find_spec("h5py") is None:
            raise CheckpointError(f"{where}: is HDF5; install bnconvert[keras] to read it")
        self.where = where
        target = str(path) if descriptor is None else f"fd:{descriptor}"
        self._process = subprocess.Popen(  # noqa: S603 (our own file, by this interpreter)
            [sys.executable, "-I", str(_CHILD), target, str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=() if descriptor is None else (descriptor,),
            env={"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"},
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._receive()

    def listing(self) -> Listing:
        """Return what the file holds."""
        answer = json.loads(self._ask({"list": True}, MAX_LISTING))
        return Listing(answer["datasets"], answer["attributes"])

    def tensor(self, name: str, entry: dict[str, Any]) -> LazyTensor:
        """Return a dataset, read when it is asked for.

        Args:
            name: Its path.
            entry: Its description in the listing.
        """
        dtype = numpy_dtype(str(entry["dtype"]).lstrip("<>=|"))
        shape = tuple(int(size) for size in entry["shape"])
        nbytes = math.prod(shape) * dtype.itemsize

        def load() -> Tensor:
            data = self._ask({"read": name}, nbytes)
            if len(data) != nbytes:
                raise CheckpointError(f"{self.where}: {name} has {len(data)} bytes, not {nbytes}")
            if not data:
                return torch.empty(shape, dtype=dtype)
            return as_dtype(torch.frombuffer(data, dtype=torch.uint8), dtype).reshape(shape)

        return LazyTensor(shape, dtype, load)

    def close(self) -> None:
        """End the child."""
        self._finalizer()

    def _ask(self, request: dict[str, Any], limit: int) -> bytearray:
        stdin = self._process.stdin
        if stdin is None or self._process.poll() is not None:
            raise CheckpointError(f"{self.where}: its HDF5 reader has ended; the file is damaged")
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        return self._receive(limit)

    def _receive(self, limit: int = 0) -> bytearray:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self._read(1)
        header = json.loads(line)
        if "error" in header:
            raise CheckpointError(f"{self.where}: is damaged or refused ({header['error']})")
        if header["nbytes"] > limit:
            raise CheckpointError(f"{self.where}: answers with more than it holds; it is damaged")
        data = bytearray(header["nbytes"])
        view, done = memoryview(data), 0
        while done < len(data):
            part = self._read(len(data) - done)
            view[done : done + len(part)] = part
            done += len(part)
        return data

    def _read(self, count: int) -> bytes:
        stdout = self._process.stdout
        if stdout is None:
            raise CheckpointError(f"{self.where}: its HDF5 reader has no output")
        until = time.monotonic() + DEADLINE
        ready, _, _ = select.select([stdout], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            self.close()
            raise CheckpointError(
                f"{self.where}: libhdf5 did not answer in {DEADLINE:g} s; the file is damaged"
            )
        data = os.read(stdout.fileno(), min(count, 1 << 20))
        if not data:
            code = self._process.wait()
            self.close()
            raise CheckpointError(
                f"{self.where}: libhdf5 ended with code {code}; the file is damaged"
            )
        return data


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes and end the child; called when its file is no longer used."""
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait()
