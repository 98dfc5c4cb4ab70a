"""A long campaign of damaged checkpoint files.

    python benchmarks/fuzz_checkpoint.py --count 20000 [--format "torch zip"] [--log FILE]

Every format's specimen is damaged in `count` ways drawn by hypothesis; each file must be read or
refused in one line, in bounded time and memory, with no file left open. HDF5 files are read in a
child process each, here forked from one that has started. With a log, a campaign that was stopped
goes on with the formats that are not in it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hypothesis import HealthCheck, given, seed, settings

from benchmarks.hdf5_server import Server
from tests.checkpoint_fuzz import HDF5, SEEDS, SPECIMENS, check, damaged

MEMORY = Path("/dev/shm")  # noqa: S108 (a private folder is made in it)


def campaign(name: str, count: int, start: int) -> str:
    """Run one format's campaign and return how its files fared."""
    results: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        path = {**SPECIMENS, **HDF5}[name](Path(folder) / "specimen.bin")
        content = path.read_bytes()

        @seed(start)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(SEEDS)
        def run(number: int) -> None:
            results[check(path, damaged(content, number))] += 1

        begin = time.monotonic()
        with Server().serving() if name in HDF5 else contextlib.nullcontext():
            run()
    seconds = time.monotonic() - begin
    told = ", ".join(f"{number} {what}" for what, number in sorted(results.items()))
    return f"{name}: {sum(results.values())} files in {seconds:.0f} s: {told}"


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=[*SPECIMENS, *HDF5])
    parser.add_argument("--log", type=Path, help="append results; skip formats that are in it")
    options = parser.parse_args()
    log: Path | None = options.log
    done = log.read_text().splitlines() if log is not None and log.exists() else []
    for name in [options.format] if options.format else [*SPECIMENS, *HDF5]:
        if any(line.startswith(f"{name}: {options.count} files") for line in done):
            continue
        result = campaign(name, options.count, options.seed)
        print(result, flush=True)
        if log is not None:
            with log.open("a") as stream:
                stream.write(f"{result}\n")


if __name__ == "__main__":
    main()
