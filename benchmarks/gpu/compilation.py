"""Compiles the kernels: all for this GPU, on all cores, or a few for every architecture."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from bnconvert.kernels import nvrtc
from bnconvert.kernels.variants import Variant, all_variants, translation_unit

if TYPE_CHECKING:
    from benchmarks.gpu.results import Results

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


def compile_size(variant: Variant, architecture: int) -> int:
    """Compile a variant into the cache; return the bytes of its code."""
    return len(nvrtc.cubin(variant, architecture))


def compile_all(results: Results) -> None:
    """Compile every variant for this GPU, so that nothing is compiled while time is measured."""
    properties = torch.cuda.get_device_properties(0)
    architecture = 10 * properties.major + properties.minor
    variants = all_variants()
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        sizes = list(pool.map(compile_size, variants, repeat(architecture), chunksize=8))
    seconds = time.perf_counter() - start
    results.fact(
        "compilation",
        f"{len(sizes)} variants, {sum(sizes) / 1e6:.1f} MB, {seconds:.0f} s "
        f"on {os.cpu_count()} cores",
    )


def compile_some() -> None:
    """Compile a few variants for every architecture; this needs no GPU."""
    variants = [
        Variant("stats", torch.bfloat16, True, 8),
        *(
            Variant(kernel, torch.bfloat16, True, 8, "relu")
            for kernel in ("normalize", "backward_reduce", "backward_input")
        ),
    ]
    for architecture in ARCHITECTURES:
        start = time.perf_counter()
        size = len(nvrtc.compile_source(translation_unit(variants), architecture))
        seconds = time.perf_counter() - start
        print(f"sm_{architecture}: 4 kernels compiled, {size} bytes, {seconds:.1f} s", flush=True)
