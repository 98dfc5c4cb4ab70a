"""Errors put into the kernel sources are noticed by the shim; so are those of the sanitizers' kind.

Each mutation is a mistake that a GPU may forgive for long: without these tests, nobody would know
that the others could see it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bnconvert.kernels import native
from bnconvert.kernels.variants import FOLDER, Variant, all_variants
from tests.shim.driver import COMPILER, SANITIZERS, ShimDriver, ShimError, build, small_blocks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SEEDS = range(1, 9)


class Mutation(NamedTuple):
    """A text of a source file that is replaced once, and how the mistake shows."""

    file: str
    text: str
    replacement: str
    shows: str  # "results", or a part of the shim's message


MUTATIONS = {
    "no barrier in the block's sum": Mutation(
        "reduction.cuh", "    __syncthreads();\n    if (y + half", "    if (y + half", "results"
    ),
    "no barrier before the scratch is used again": Mutation(
        "reduction.cuh",
        "    height = half;\n  }\n  __syncthreads();",
        "    height = half;\n  }",
        "results",
    ),
    "no barrier behind the ticket": Mutation(
        "reduction.cuh",
        "  }\n  __syncthreads();\n  const bool last",
        "  }\n  const bool last",
        "barrier: a thread returned before it",
    ),
    "no barrier behind the constants": Mutation(
        "channel.cuh", "    }\n    __syncthreads();\n", "    }\n", "results"
    ),
    "scratch written before all have read the constants": Mutation(
        "backward_reduce.cuh", "  __syncthreads();\n", "", "results"
    ),
    "early return before a barrier": Mutation(
        "stats.cuh",
        "  double totals[2 * A];",
        "  if (position.count == 0) return;\n  double totals[2 * A];",
        "barrier: a thread returned before it",
    ),
    "shared memory read that nobody wrote": Mutation(
        "reduction.cuh", "if (y + half < height) {", "if (y < half) {", "results"
    ),
    "constant that is never set": Mutation(
        "normalize.cuh", "    constants.set(1, i, kUnit<F> * scale);\n", "", "results"
    ),
    "shared memory written behind its end": Mutation(
        "channel.cuh",
        "shared[k * channels + index] =",
        "shared[(k + 1) * channels + index] =",
        "shared memory: written behind its end",
    ),
    "next vector instead of this one": Mutation(
        "normalize.cuh",
        "load<T, V>(x + position.offset)",
        "load<T, V>(x + position.offset + V)",
        "results",
    ),
    "vectors of a row counted one short": Mutation(
        "position.cuh", "within >= geometry", "within > geometry", "results"
    ),
    "one split left out": Mutation(
        "reduction.cuh",
        "split = threadIdx.y; split < gridDim.y",
        "split = threadIdx.y; split < gridDim.y - 1",
        "results",
    ),
    "counter that is not returned": Mutation(
        "reduction.cuh",
        "atomicInc(&counters[blockIdx.x], gridDim.y - 1)",
        "atomicInc(&counters[blockIdx.x], gridDim.y)",
        "a counter was not returned to zero",
    ),
    "mask with the other sign of zero": Mutation(
        "activation.cuh", "t <= 0.0f ? 0.0f : grad", "t < 0.0f ? 0.0f : grad", "results"
    ),
    "remainder of the mean forgotten": Mutation(
        "normalize.cuh", "(batch.mean - mean) * scale", "0.0", "results"
    ),
}


def variants_of_step() -> tuple[Variant, ...]:
    """Return what `step` launches: four kernels on three tensors."""
    return tuple(
        v
        for v in all_variants()
        if v.dtype == torch.float32
        and (v.channels_last, v.width) in ((False, 1), (True, 2), (True, 4))
        and v.activation == ("none" if v.kernel == "stats" else "relu")
        and not v.residual
    )


def step(sources: Path, seed: int, flags: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """Run all kernels on small tensors."""
    driver = ShimDriver(3, seed, sources, flags, variants_of_step())
    generator = torch.Generator().manual_seed(0)
    results: list[torch.Tensor] = []
    # Few channels and many in a tile, several vectors of a thread, several splits; a mean that
    # float32 does not hold.
    with small_blocks():
        for shape in ((7, 6, 9, 3), (7, 6, 9, 3), (21, 80)):
            x = torch.randn(shape, generator=generator) / 64.0 + 1000.1
            grad = torch.randn(shape, generator=generator)
            if len(results) == len(RESULTS):
                x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
            results += step_of(driver, x, grad)
    return results


RESULTS = ("sums", "output", "statistics", "reduced", "grad_weight", "grad_bias", "grad_input")


def step_of(driver: ShimDriver, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Run all kernels once; some weights and biases are exactly zero."""
    relu = native.Activation("relu")
    weight, bias = (torch.arange(x.shape[1]).remainder(n).sub(1).float() for n in (3, 4))
    sums = native.local_sums(driver, x)
    output, statistics = native.normalize_(
        driver, x, None, weight, bias, sums, None, None, None, 0.1, 1e-5, relu
    )
    rest = (x, None, weight, bias, statistics)
    reduced, grad_weight, grad_bias = native.backward_sums(driver, grad, *rest, relu)
    grad_input, _ = native.backward_input(driver, grad, *rest, reduced, relu)
    return [sums, output, statistics, reduced, grad_weight, grad_bias, grad_input]


def other_variants() -> tuple[Variant, ...]:
    """Return what `other_step` launches: two-byte elements, alone and eight at a time."""
    return tuple(
        v
        for v in all_variants()
        if v.dtype == torch.bfloat16
        and (v.channels_last, v.width) in ((False, 1), (True, 8))
        and v.activation == ("none" if v.kernel == "stats" else "silu")
        and v.residual == (v.kernel != "stats")
    )


def other_step() -> None:
    """Run all kernels with a residual, running statistics and gradients of bfloat16 parameters."""
    driver = ShimDriver(3, 1, FOLDER, SANITIZERS, other_variants())
    silu = native.Activation("silu")
    with small_blocks():
        for channels_last in (False, True):
            x, grad, residual = (torch.randn(7, 24, 9, 3).bfloat16() for _ in range(3))
            if channels_last:
                x, grad, residual = (
                    t.contiguous(memory_format=torch.channels_last) for t in (x, grad, residual)
                )
            weight, bias = torch.randn(24).bfloat16(), torch.randn(24).bfloat16()
            running = torch.randn(24), torch.rand(24), torch.tensor(1)
            sums = native.local_sums(driver, x)
            _, statistics = native.normalize_(
                driver, x, residual, weight, bias, sums, *running, None, 1e-5, silu
            )
            rest = (x, residual, weight, bias, statistics)
            reduced, _, _ = native.backward_sums(driver, grad, *rest, silu)
            native.backward_input(driver, grad, *rest, reduced, silu)


@pytest.fixture(scope="module")
def correct() -> list[torch.Tensor]:
    return step(FOLDER, 1)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_in_the_sources_are_noticed(
    name: str, tmp_path: Path, correct: list[torch.Tensor]
) -> None:
    mutation = MUTATIONS[name]
    sources = tmp_path / "cuda"
    shutil.copytree(FOLDER, sources)
    path = sources / mutation.file
    text = path.read_text("utf-8")
    assert text.count(mutation.text) >= 1
    path.write_text(text.replace(mutation.text, mutation.replacement, 1), "utf-8")
    assert mutation.shows in {noticed(sources, seed, correct) for seed in SEEDS}


def noticed(sources: Path, seed: int, correct: list[torch.Tensor]) -> str:
    """Return how a mistake shows in one order of threads: a message, "results" or not at all."""
    try:
        results = step(sources, seed)
    except ShimError as error:
        return str(error).partition(": ")[2]
    same = all(a.equal(b) for a, b in zip(results, correct, strict=True))
    return "" if same else "results"


def test_unchanged_sources_pass_in_any_order(correct: list[torch.Tensor]) -> None:
    for seed in SEEDS:
        assert all(a.equal(b) for a, b in zip(step(FOLDER, seed), correct, strict=True))


def run_sanitized(sources: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    """Run `step` under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""
    assert COMPILER is not None
    libraries = [
        subprocess.run(  # noqa: S603 (a compiler, our arguments)
            [COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("this g++ comes without its sanitizers")
    # Built here: the compiler itself is not to run under them.
    build(variants_of_step(), SANITIZERS, sources)
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    code = (
        "import sys; from pathlib import Path; from tests import test_kernels_mutations as t; "
        f"t.step(Path(sys.argv[1]), 1, t.SANITIZERS); {more}print('clean')"
    )
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, str(sources)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_the_sanitizers_find_nothing() -> None:
    build(other_variants(), SANITIZERS)
    result = run_sanitized(FOLDER, "t.other_step(); ")
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "clean"


WRONG_ADDRESSES = {
    "heap-buffer-overflow": "x + position.offset + V",
    "misaligned address": "reinterpret_cast<const T*>(reinterpret_cast<const char*>(x) + 1)",
}
"""Reads that change no result, by what the sanitizers call them."""


@pytest.mark.parametrize("report", WRONG_ADDRESSES)
def test_the_sanitizers_find_wrong_addresses(tmp_path: Path, report: str) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(FOLDER, sources)
    path = sources / "stats.cuh"
    content = path.read_text("utf-8")
    before = "      position.advance(geometry);"
    read = f"      float unused[V];\n      load<T, V>({WRONG_ADDRESSES[report]}).get(unused);\n"
    assert content.count(before) == 1
    path.write_text(content.replace(before, read + before), "utf-8")
    result = run_sanitized(sources)
    assert result.returncode != 0
    assert report in result.stderr
