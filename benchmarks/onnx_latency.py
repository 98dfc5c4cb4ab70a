"""Latency in onnxruntime of the files that bnconvert and its peers make of the same models.

    python -m benchmarks.onnx_latency [--json] [--rounds N] [MODEL ...]

One thread, batch 1 and 8, all of onnxruntime's own rewrites on. The files of one model are run in
turn, so that a busy machine slows all of them. Ratio: a peer / ours, the median over the rounds,
and of all peers the lowest; above 1 where ours is faster. The last column is our own file, opened a
second time, against itself: how far from 1 noise alone goes. See benchmarks/onnx_peers.py for the
peers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime
import timm
import torch

from benchmarks.onnx_peers import OURS, Made, make_all
from bnconvert.arguments import input_size, random_images
from bnconvert.report import format_table
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    import numpy as np

MODELS = (
    "resnet18",
    "densenet121",
    "levit_128s",
    "fastvit_t8",
    "repvgg_a0",
    "mobileone_s0",
    "inception_next_atto",
    "efficientnet_lite0",
    "mobilenetv3_small_100",
    "regnetx_002",
)
BATCHES = (1, 8)
AGAIN = "bnconvert again"


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in options.models for row in measure(name, options.rounds)]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(format_table(_table(rows))))


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return one row per batch size for a model."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    randomize_batchnorm(model)
    _fill_zeros(model)
    size = input_size(model)
    with tempfile.TemporaryDirectory() as folder:
        made = make_all(model, random_images(size, 2), Path(folder))
        sessions = {each.maker: _session(each) for each in made if each.path is not None}
        sessions[AGAIN] = _session(made[0])
    rows = []
    for batch in BATCHES:
        times = _interleaved(sessions, random_images(size, batch).numpy(), rounds)
        ratios = {maker: _ratio(times[maker], times[OURS]) for maker in times if maker != OURS}
        again = ratios.pop(AGAIN)
        medians = {m: statistics.median(found) for m, found in times.items() if m != AGAIN}
        ratio = min(ratios.values())
        rows.append({"model": name, "batch": batch, "ms": medians, "ratio": ratio, "again": again})
    return rows


def _fill_zeros(model: torch.nn.Module) -> None:
    """Give parameters that start as zeros values; simplifiers drop additions of zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)


def _session(made: Made) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    path = str(made.path)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _ratio(peer: list[float], ours: list[float]) -> float:
    return statistics.median(theirs / own for theirs, own in zip(peer, ours, strict=True))


def _interleaved(
    sessions: dict[str, onnxruntime.InferenceSession], images: np.ndarray, rounds: int
) -> dict[str, list[float]]:
    """Return milliseconds of processor time of each round, by maker."""
    times: dict[str, list[float]] = {maker: [] for maker in sessions}
    for number in range(rounds + 2):
        turn = number % len(sessions)  # that each runs in every place
        for maker in (*[*sessions][turn:], *[*sessions][:turn]):
            session = sessions[maker]
            feed = {session.get_inputs()[0].name: images}
            start = time.thread_time()
            session.run(None, feed)
            if number >= 2:  # the first runs allocate
                times[maker].append(1e3 * (time.thread_time() - start))
    return times


def _table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    makers = list(dict.fromkeys(maker for row in rows for maker in row["ms"]))
    table: list[tuple[str, ...]] = [
        ("model", "batch", *(f"{maker} ms" for maker in makers), "best peer / ours", "again / ours")
    ]
    for row in rows:
        times = [f"{row['ms'][m]:.2f}" if m in row["ms"] else "failed" for m in makers]
        table.append(
            (row["model"], str(row["batch"]), *times, f"{row['ratio']:.2f}", f"{row['again']:.2f}")
        )
    return table


if __name__ == "__main__":
    main()
