"""Speed and memory of converting checkpoints, against the usual ways, in one run.

    python benchmarks/checkpoint.py --gigabytes 2 --folder /tmp

Every task runs in a process of its own after the source's pages were read once, so that all start
from a warm cache. Time ends when the result is on the disk (fsync). Memory is the growth of
anonymous memory over what the imports take, sampled every 5 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = 64


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class Sampler(threading.Thread):
    """Samples anonymous memory until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = self.peak = anonymous()
        self.ended = threading.Event()

    def run(self) -> None:
        """Sample every 5 ms."""
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, anonymous())

    def stop(self) -> int:
        """Return the growth of memory in bytes."""
        self.ended.set()
        self.join()
        return max(self.peak, anonymous()) - self.base


def flush(path: Path) -> None:
    """Write a file or the files of a folder to the disk."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def ours(verify: bool, hash_source: bool) -> Callable[[Path, Path], None]:
    """Return our conversion with or without its checks."""
    from bnconvert.checkpoint import convert_checkpoint

    def run(source: Path, target: Path) -> None:
        shards = None if target.suffix else 1 << 29
        convert_checkpoint(
            source, target, verify=verify, hash_source=hash_source, max_shard_size=shards
        )

    return run


def copy(source: Path, target: Path) -> None:
    """Copy with `cp`."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)  # noqa: S603, S607


def torch_mmap(source: Path, target: Path) -> None:
    """Load by memory map and save with safetensors."""
    import safetensors.torch
    import torch

    safetensors.torch.save_file(torch.load(source, mmap=True, weights_only=True), target)


def hub(source: Path, target: Path) -> None:
    """Save shards with huggingface_hub."""
    import safetensors.torch
    from huggingface_hub import save_torch_state_dict

    target.mkdir()
    state = safetensors.torch.load_file(source)
    save_torch_state_dict(state, str(target), max_shard_size=1 << 29)


def dcp_to_torch(source: Path, target: Path) -> None:
    """Convert with torch's own tool, and its result with safetensors."""
    import safetensors.torch
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    between = target.with_suffix(".between")
    dcp_to_torch_save(source, between)
    safetensors.torch.save_file(torch.load(between, mmap=True, weights_only=True), target)
    between.unlink()


TASKS: dict[str, dict[str, Callable[[], Callable[[Path, Path], None]]]] = {
    "torch zip -> safetensors": {
        "cp + fsync": lambda: copy,
        "ours, all checks": lambda: ours(True, True),
        "ours, no hash": lambda: ours(True, False),
        "ours, no checks": lambda: ours(False, False),
        "save_file(torch.load(mmap=True))": lambda: torch_mmap,
    },
    "safetensors -> sharded": {
        "cp + fsync": lambda: copy,
        "ours, all checks": lambda: ours(True, True),
        "ours, no hash": lambda: ours(True, False),
        "ours, no checks": lambda: ours(False, False),
        "huggingface_hub.save_torch_state_dict": lambda: hub,
    },
    "DCP -> safetensors": {
        "cp + fsync": lambda: copy,
        "ours, all checks": lambda: ours(True, True),
        "ours, no hash": lambda: ours(True, False),
        "ours, no checks": lambda: ours(False, False),
        "dcp_to_torch_save, then save_file": lambda: dcp_to_torch,
    },
}
SOURCES = {"torch zip": "w.pth", "safetensors": "w.safetensors", "DCP": "w.dcp"}


def target_of(task: str) -> str:
    """Return the name of a task's result."""
    return "result" if task.endswith("sharded") else "result.safetensors"


def one(task: str, method: str, folder: Path) -> None:
    """Run one method in this process and print its time and memory as JSON."""
    import bnconvert.checkpoint  # noqa: F401 (part of the baseline)

    source = folder / SOURCES[task.split(" -> ")[0]]
    target = folder / target_of(task)
    run = TASKS[task][method]()
    sampler = Sampler()
    sampler.start()
    start = time.perf_counter()
    run(source, target)
    flush(target)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "memory": sampler.stop()}))


def make(folder: Path, nbytes: int) -> None:
    """Write the sources: tensors of equal size with a few short ones between."""
    import safetensors.torch
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    count = nbytes // TENSORS // 4
    state = {}
    for index in range(TENSORS):
        state[f"layer{index}.weight"] = torch.randn(count)
        for leaf in ("running_mean", "running_var"):
            state[f"layer{index}.bn.{leaf}"] = torch.rand(256) + 0.5
        state[f"layer{index}.bn.num_batches_tracked"] = torch.tensor(index)
    torch.save(state, folder / SOURCES["torch zip"])
    safetensors.torch.save_file(state, folder / SOURCES["safetensors"])
    save(state, checkpoint_id=folder / SOURCES["DCP"], no_dist=True)
    flush(folder)


def warm(path: Path) -> None:
    """Read a source once."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                while stream.read(1 << 24):
                    pass


def remove(path: Path) -> None:
    """Remove a result and let the disk settle."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def table(folder: Path, nbytes: int, repeats: int) -> None:
    """Run every method of every task and print the table."""
    for task, methods in TASKS.items():
        print(f"\n{task}, {nbytes / 1e9:.1f} GB, best of {repeats}")
        print(f"  {'':40}{'GB/s':>8}{'of cp':>8}{'memory':>12}")
        baseline = 0.0
        results: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
        for _ in range(repeats):
            for method in methods:
                warm(folder / SOURCES[task.split(" -> ")[0]])
                command = [sys.executable, __file__, "--one", task, method, "--folder", str(folder)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
                results[method].append(json.loads(done.stdout.splitlines()[-1]))
                remove(folder / target_of(task))
        for method, runs in results.items():
            speed = nbytes / min(run["seconds"] for run in runs) / 1e9
            memory = max(run["memory"] for run in runs) / 1e6
            baseline = baseline or speed
            print(f"  {method:40}{speed:8.2f}{speed / baseline:8.2f}{memory:9.0f} MB")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--one", nargs=2, metavar=("TASK", "METHOD"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        task, method = given.one
        one(task, method, given.folder)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        nbytes = int(given.gigabytes * 1e9)
        make(folder, nbytes)
        table(folder, nbytes, given.repeats)


if __name__ == "__main__":
    main()
