"""What NVRTC makes of every kernel: spills, registers and instructions per element.

Compiles all variants for all architectures, without a GPU; with the `cuobjdump` of Triton's wheel
it also reads the code. Ends with 1 if a variant spills or uses local memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bnconvert.kernels import nvrtc
from bnconvert.kernels.variants import KERNELS, Variant, all_variants, translation_unit
from bnconvert.report import format_table
from tests.sass import Kernel, cuobjdump, disassemble

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


def main(arguments: list[str] | None = None) -> int:
    """Compile, print a table per architecture, and say which variants are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sm", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--common", action="store_true", help="only the variants of the table")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    parser.add_argument("--json", type=Path, help="also write every variant's numbers here")
    options = parser.parse_args(arguments)
    variants = [v for v in all_variants() if not options.common or is_common(v)]
    pieces = [variants[start : start + 12] for start in range(0, len(variants), 12)]
    found: list[dict[str, Any]] = []
    for architecture in options.sm:
        start = time.perf_counter()
        with ThreadPoolExecutor(options.jobs) as pool:
            for rows in pool.map(lambda group: examine(group, architecture), pieces):  # noqa: B023
                found += rows
        seconds = time.perf_counter() - start
        print(f"sm_{architecture}: {len(variants)} variants in {seconds:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print("\n".join(summary(found)))
    bad = [row for row in found if row["stack"] or row["local"] or row["spills"]]
    for row in bad:
        print(f"sm_{row['sm']} {row['name']}: spills or uses local memory")
    return 1 if bad else 0


def is_common(variant: Variant) -> bool:
    """Whether a variant stands in the table: bfloat16, channels last, 16-byte accesses."""
    return (
        variant.dtype == torch.bfloat16
        and variant.channels_last
        and variant.width == 8
        and not variant.residual
    )


def examine(variants: list[Variant], architecture: int) -> list[dict[str, Any]]:
    """Compile variants and return what their code needs."""
    code = nvrtc.compile_source(translation_unit(variants), architecture)
    if cuobjdump() is None:
        return []
    kernels = disassemble(code)
    rows = []
    for variant in variants:
        kernel = kernels[variant.name]
        rows.append(
            {
                "sm": architecture,
                "name": variant.name,
                "kernel": variant.kernel,
                "activation": variant.activation,
                "common": is_common(variant),
                "registers": kernel.registers,
                "stack": kernel.stack,
                "local": kernel.local,
                "spills": kernel.count(r"\b(LDL|STL)\b"),
                "per_element": per_element(kernel, variant) if is_common(variant) else None,
            }
        )
    return rows


def per_element(kernel: Kernel, variant: Variant) -> float:
    """Return the instructions for each element in the loop over the elements."""
    loop = kernel.hot_loop()
    streams = (2 if variant.kernel.startswith("backward") else 1) + variant.residual
    return len(loop.instructions) * streams / (loop.count(r"\bLDG\b") * variant.width)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of the common variants."""
    common = [row for row in rows if row["common"]]
    architectures = sorted({row["sm"] for row in common})
    table = [("kernel", "activation", *(f"sm_{sm}" for sm in architectures))]
    for kernel in KERNELS:
        for activation in dict.fromkeys(r["activation"] for r in common if r["kernel"] == kernel):
            cells = {
                row["sm"]: f"{row['per_element']:.1f} ({row['registers']})"
                for row in common
                if (row["kernel"], row["activation"]) == (kernel, activation)
            }
            table.append((kernel, activation, *(cells[sm] for sm in architectures)))
    if not common:
        return ["no cuobjdump: the code was not read"]
    title = "Instructions per element (registers), bfloat16, channels last, 16-byte accesses:"
    return [title, *format_table(table)]


if __name__ == "__main__":
    sys.exit(main())
