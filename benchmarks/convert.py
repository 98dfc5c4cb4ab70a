"""Time to convert a model to synchronised BatchNorm and back, against torch's converter.

Medians of interleaved runs on timm models with many BatchNorm layers, and on a synthetic tree of
100,000 modules; and the bytes that one layer sends per forward pass for growing numbers of ranks,
counted from the buffers that the code makes (torch's gathers them from all ranks).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import timm
import torch
import torch.distributed as dist
from torch import nn

from bnconvert import SyncBatchNorm2d, convert_sync_batchnorm, revert_sync_batchnorm
from bnconvert.report import format_table

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = ("resnet152", "densenet201", "efficientnet_b7", "mobilenetv3_large_100")
WORLD_SIZES = (2, 8, 64, 256, 1024)
CHANNELS = 256


def tree(modules: int) -> nn.Module:
    """Return a tree of about so many modules; every fourth is a BatchNorm."""
    block = [nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Identity()]
    return nn.Sequential(
        *(
            nn.Sequential(*(type(m)(*a) for m, a in zip(block, ((1, 1, 1), (), ()), strict=True)),
                          nn.BatchNorm2d(1))
            for _ in range(modules // 5)
        )
    )  # fmt: skip


def measure(build: Callable[[], nn.Module], rounds: int) -> dict[str, float]:
    """Return median seconds of both directions and of torch's converter, run in turn."""
    times: dict[str, list[float]] = {"convert": [], "revert": [], "torch": []}
    for _ in range(rounds):
        ours, theirs = build(), build()
        for name, model, run in (
            ("convert", ours, convert_sync_batchnorm),
            ("torch", theirs, nn.SyncBatchNorm.convert_sync_batchnorm),
            ("revert", ours, revert_sync_batchnorm),
        ):
            start = time.thread_time()
            run(model)
            times[name].append(time.thread_time() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def payload(world_size: int) -> dict[str, int]:
    """Return the bytes per layer and rank that a forward pass holds for communication.

    Ours are those of the buffers that the layer really gives to the all-reduce, in a group of fake
    ranks. torch's layer runs on GPUs only; its function gathers [mean | invstd | count] of every
    rank, 2C + 1 values in float32.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            SyncBatchNorm2d(CHANNELS, device="cpu")(torch.randn(2, CHANNELS, 2, 2, device="cpu"))
        sent = sum(call.args[0].nbytes for call in all_reduce.call_args_list)
    finally:
        dist.destroy_process_group()
    return {
        "ours": sent,
        "torch": world_size * (2 * CHANNELS + 1) * torch.float32.itemsize,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    builders: dict[str, Callable[[], nn.Module]] = {
        name: lambda name=name: timm.create_model(name) for name in MODELS
    }
    for count in (10_000, 100_000):
        builders[f"tree of {count:,} modules"] = lambda count=count: tree(count)
    torch.set_default_device("meta")  # building is not measured, and conversion moves no values
    times = {name: measure(build, options.rounds) for name, build in builders.items()}
    bytes_sent = {size: payload(size) for size in WORLD_SIZES}
    if options.json:
        print(json.dumps({"seconds": times, "bytes": bytes_sent}))
        return
    rows: list[tuple[str, ...]] = [("model", "convert ms", "revert ms", "ours/torch")]
    rows += [(name, *_times(found)) for name, found in times.items()]
    print("\n".join(format_table(rows)))
    print(f"bytes per layer of {CHANNELS} channels and rank, forward")
    rows = [("ranks", "ours", "torch")]
    rows += [(str(size), str(b["ours"]), str(b["torch"])) for size, b in bytes_sent.items()]
    print("\n".join(format_table(rows)))


def _times(found: dict[str, Any]) -> tuple[str, str, str]:
    return (
        f"{1e3 * found['convert']:.1f}",
        f"{1e3 * found['revert']:.1f}",
        f"{found['convert'] / found['torch']:.2f}",
    )


if __name__ == "__main__":
    main()
