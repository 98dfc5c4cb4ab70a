"""Everything about the CUDA kernels that only a GPU can show, in one call of under 8 minutes.

Without a GPU the kernels are compiled and the program says so and ends with 0. With one, the
results are kept in a JSON file after every step, and `docs/gpu.md` is written from them; the
program ends with 1 if a check of the numbers failed. A goal that is missed is reported, not an
error.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu import compilation, kernels, layers, report, timing
from benchmarks.gpu.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"

SECTIONS: tuple[tuple[str, Callable[[Results], None]], ...] = (
    ("first launch", kernels.first_launch),
    ("compilation", compilation.compile_all),
    ("numerics", kernels.numerics),
    ("NCCL with one rank", layers.agrees_over_nccl),
    ("no synchronisation", layers.never_waits),
    ("CUDA graph", layers.captured),
    ("whole layer", layers.whole_layer),
    ("bandwidth", kernels.bandwidth),
    ("two processes", layers.agrees_over_gloo),
    ("ResNet-50", layers.resnet50),
)


def main(arguments: list[str] | None = None) -> int:
    """Run what this machine can run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=450.0, help="time for the whole run")
    parser.add_argument("--json", type=Path, default=Path("build/gpu.json"), help="raw results")
    parser.add_argument("--page", type=Path, default=PAGE, help="Markdown page, with a GPU only")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        return without_gpu()
    results = Results(options.json, options.seconds)
    environment(results)
    for name, section in SECTIONS:
        run(name, section, results)
        options.page.write_text(report.render(results.data), "utf-8")
    sanitizer(results)
    options.page.write_text(report.render(results.data), "utf-8")
    return 1 if any(not name.startswith("goal:") for name in results.failed) else 0


def without_gpu() -> int:
    """Compile, which needs no GPU, and say that nothing else was done."""
    if importlib.util.find_spec("cuda") is None:
        print("no CUDA device and no cuda.bindings: nothing can be compiled or measured here")
        return 0
    compilation.compile_some()
    print("no CUDA device: nothing was run or measured")
    return 0


def environment(results: Results) -> None:
    """Keep what the numbers depend on."""
    properties = torch.cuda.get_device_properties(0)
    results.fact("device", properties.name)
    results.fact("date", time.strftime("%Y-%m-%d"))
    results.fact("architecture", f"sm_{properties.major}{properties.minor}")
    results.fact("multiprocessors", properties.multi_processor_count)
    results.fact("torch", torch.__version__)
    results.fact("python", sys.version.split()[0])
    results.fact("copy bandwidth in GB/s", round(timing.copy_bandwidth() / 1e9))


def run(name: str, section: Callable[[Results], None], results: Results) -> None:
    """Run a section; an error in it is a failed check, and the others go on."""
    if results.seconds_left < 30:
        results.skip(name, "no time left")
        return
    try:
        section(results)
    except Exception as error:
        traceback.print_exc()
        results.check(f"{name} runs", False, f"{type(error).__name__}: {error}".splitlines()[0])


def sanitizer(results: Results) -> None:
    """Run small shapes under compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    for check in ("memcheck", "racecheck"):
        if tool is None or results.seconds_left < 60:
            reason = "it is not installed" if tool is None else "no time left"
            results.skip(f"compute-sanitizer {check}", reason)
            continue
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-c", SMALL]
        try:
            done = subprocess.run(  # noqa: S603 (a tool of the CUDA toolkit)
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=results.seconds_left - 10,
            )
        except subprocess.TimeoutExpired:
            results.skip(f"compute-sanitizer {check}", "no time left")
            continue
        last = (done.stdout.strip().splitlines() or [""])[-1]
        results.check(f"compute-sanitizer {check}", done.returncode == 0, last)


SMALL = """
import torch
from benchmarks.gpu import kernels
for dtype in (torch.float32, torch.bfloat16):
    for channels_last, shape in (True, (3, 40, 5, 5)), (False, (3, 5, 7, 7)), (False, (3, 5, 8, 8)):
        kernels.largest_error(kernels.own_driver(), shape, dtype, channels_last, 'relu', True)
torch.cuda.synchronize()
"""


if __name__ == "__main__":
    sys.exit(main())
