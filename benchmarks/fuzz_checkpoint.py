"""A long campaign of damaged checkpoint files.

    python benchmarks/fuzz_checkpoint.py --count 20000 [--format "torch zip"]

Every format's specimen is damaged in `count` ways drawn by hypothesis; each file must be read or
refused in one line, in bounded time and memory, with no file left open. HDF5 costs a child process
for each file, about a second.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hypothesis import HealthCheck, given, seed, settings

from tests.checkpoint_fuzz import HDF5, SPECIMENS, check, damaged


def campaign(name: str, count: int, start: int) -> None:
    """Run one format's campaign and print how its files fared."""
    results: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = {**SPECIMENS, **HDF5}[name](Path(folder) / "specimen.bin")

        @seed(start)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(damaged(path.read_bytes()))
        def run(data: bytes) -> None:
            results[check(path, data)] += 1

        begin = time.monotonic()
        run()
    seconds = time.monotonic() - begin
    told = ", ".join(f"{number} {what}" for what, number in sorted(results.items()))
    print(f"{name}: {sum(results.values())} files in {seconds:.0f} s: {told}", flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=[*SPECIMENS, *HDF5])
    given_ = parser.parse_args()
    for name in [given_.format] if given_.format else [*SPECIMENS, *HDF5]:
        campaign(name, given_.count, given_.seed)


if __name__ == "__main__":
    main()
