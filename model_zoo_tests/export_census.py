"""Export the smallest model of every timm family with BatchNorm, and hard ones, beside the peers.

    python -m model_zoo_tests.export_census [--results FILE] [--summary FILE] [--minutes N]

Random weights and statistics; every file is compared with the model in float64 on several random
inputs of the smallest size that the model takes. Results are appended to a file, one JSON object a
line, and a second run goes on where the first ended. The peers are described in
benchmarks/onnx_peers.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch

from benchmarks.onnx_peers import OURS, SIMPLIFIERS, TORCH, in_float64, make_all, measure
from bnconvert.testing import randomize_batchnorm
from model_zoo_tests.fold_census import models
from model_zoo_tests.fold_zoo import read, smallest_input

RESULTS = Path("build/onnx-census.jsonl")
SUMMARY = Path("docs/onnx-census.md")
INPUTS = 5
"""Random inputs per model that errors are medians over."""


def main() -> None:
    """Run the models that have no result yet, then write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    options = parser.parse_args()
    started = time.monotonic()
    results = read(options.results)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for name in models():
        if name in results or not timm.is_model(name):
            continue
        if time.monotonic() - started > options.minutes * 60:
            break
        sys.stderr.write(f"{name}\n")
        results[name] = {"model": name, **census(name)}
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results[name]) + "\n")
    text = summarise([results[name] for name in models() if name in results])
    options.summary.write_text(text, encoding="utf-8")


def census(name: str) -> dict[str, Any]:
    """Return the figures of everyone's file for one model."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    randomize_batchnorm(model)
    try:
        images = smallest_input(model)
    except RuntimeError as error:
        return {"problem": str(error)}
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(images.shape, generator=generator) for _ in range(INPUTS)]
    cases = in_float64(model, inputs)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for made in make_all(model, images, Path(folder)):
            row: dict[str, Any] = {"seconds": round(made.seconds, 1), "problem": made.problem}
            if made.path is not None:
                row |= asdict(measure(made.path, cases))
            rows[made.maker] = row
    return {"input": list(images.shape), "files": rows}


def summarise(results: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    makers = [OURS, TORCH, *SIMPLIFIERS]
    lines = [
        "# Exporting timm to ONNX, beside the peers",
        "",
        f"Written by `python -m model_zoo_tests.export_census` with timm {timm.__version__} and",
        f"torch {torch.__version__}: {len(results)} models, the hard ones and the smallest of each",
        "family, random weights and statistics, at the smallest input that the model takes.",
        "",
        "BN: BatchNormalization nodes left. Error: largest relative difference from the model in",
        f"float64, the median of {INPUTS} random inputs, with onnxruntime's rewrites off / on.",
        "Seconds: to make the file; ours include the proof, those of onnxsim and onnxslim come on",
        "top of torch's.",
        "",
        "| model | input | " + " | ".join(f"{maker}: BN, nodes, error, KB, s" for maker in makers),
        "|---" * (2 + len(makers)) + "|",
    ]
    lines[-2] += " |"
    for result in results:
        if "problem" in result:
            lines.append(f"| {result['model']} | {result['problem']} |" + " |" * len(makers))
            continue
        cells = [_cell(result["files"].get(maker)) for maker in makers]
        size = "x".join(map(str, result["input"][2:]))
        lines.append(f"| {result['model']} | {size} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_totals(results)]) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not installed"
    if row["problem"]:
        return f"failed: {row['problem'][:80].replace('|', '/')}"
    errors = " / ".join(f"{value:.0e}" for value in row["errors"].values())
    size = f"{row['size'] / 1024:.0f}"
    return f"{row['norms']}, {row['nodes']}, {errors}, {size}, {row['seconds']:.0f}"


def _totals(results: list[dict[str, Any]]) -> list[str]:
    """Return the comparison over all models that everyone exported."""
    lines = []
    measured = [r["files"] for r in results if "files" in r]
    ours = [files[OURS] for files in measured]
    lines.append(f"- exported and proved by bnconvert: {sum(not o['problem'] for o in ours)}")
    for maker in (TORCH, *SIMPLIFIERS):
        both = [f for f in measured if maker in f and not f[maker]["problem"] + f[OURS]["problem"]]
        fewer = sum(f[OURS]["norms"] < f[maker]["norms"] for f in both)
        more = sum(f[OURS]["norms"] > f[maker]["norms"] for f in both)
        worse = [_worst(f[OURS]) / max(_worst(f[maker]), 1e-12) for f in both]
        if both:
            lines.append(
                f"- against {maker}, {len(both)} models: fewer BatchNormalization in {fewer}, more "
                f"in {more}; largest ratio of our error to theirs {max(worse):.2f}"
            )
    return lines


def _worst(row: dict[str, Any]) -> float:
    return float(max(row["errors"].values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
