"""Images per second of one training epoch: `bnconvert finetune` against a loop written by hand.

    python -m benchmarks.finetune [--rounds 3] [--json]

The loop by hand is what one writes with timm and DistributedDataParallel: the same model, images,
transforms, loader, optimizer and loss, and `nn.BatchNorm2d`. All of them run in turn, in the same
processes, so that a busy machine slows all of them. Digits of scikit-learn, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bnconvert.finetune.console import Console
from bnconvert.finetune.processes import Processes
from bnconvert.finetune.run import run
from bnconvert.finetune.settings import Settings
from bnconvert.report import format_table
from bnconvert.testing import run_ranks

WAYS = ("by hand", "plain", "sync", "frozen")


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--size", type=int, default=64, help="height and width")
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder) / "images", arguments.images)
        results = {
            count: run_ranks(measure, count, folder, vars(arguments), timeout=3600.0)[0]
            for count in (1, 2)
        }
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(table(results, arguments.model))


def write_digits(folder: Path, count: int) -> None:
    """Write digits as a folder of images by class, with a small validation folder."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number in range(count + 20):
        place = folder / ("train" if number < count else "val") / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * (255 / 16)).astype("uint8")
        Image.fromarray(pixels).resize((64, 64)).save(place / f"{number}.png")


def measure(rank: int, folder: str, options: dict[str, Any]) -> dict[str, list[float]]:
    """Return images per second of every way and round."""
    processes = Processes.present(torch.device("cpu"), 1)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options["rounds"] + 1):
        for way in WAYS:
            settings = settings_of(folder, way, options)
            rate = by_hand(settings, processes) if way == "by hand" else ours(settings, processes)
            if number:  # the first round warms up
                rates[way].append(rate)
    return rates


def settings_of(folder: str, way: str, options: dict[str, Any]) -> Settings:
    """Return the options of a run."""
    return Settings(
        model=options["model"],
        data=f"{folder}/images",
        output=f"{folder}/run",
        norm="plain" if way == "by hand" else way,  # type: ignore[arg-type]
        epochs=1,
        batch_size=options["batch_size"],
        img_size=options["size"],
        workers=0,
        force=True,
    )


def ours(settings: Settings, processes: Processes) -> float:
    """Return the images per second of the training part of `bnconvert finetune`."""
    summary = run(settings, processes, Console(shown=False, epochs=1))
    seconds: float = summary["epochs"][0][6]
    images: int = summary["training_images"]
    return images / seconds


def by_hand(settings: Settings, processes: Processes) -> float:
    """Return the images per second of a loop written with timm and torch."""
    import timm
    from timm.data import create_dataset, create_transform, resolve_data_config
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    model = timm.create_model(settings.model, num_classes=10)
    config = resolve_data_config({"img_size": settings.img_size}, model=model)
    dataset = create_dataset("", root=f"{settings.data}/train")
    dataset.transform = create_transform(**config, is_training=True, color_jitter=0.4)
    sampler: DistributedSampler[int] | None = None
    if processes.size > 1:
        sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, settings.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=0
    )
    optimizer = create_optimizer_v2(
        model, opt=settings.opt, lr=settings.lr, weight_decay=settings.weight_decay
    )
    criterion = LabelSmoothingCrossEntropy(settings.smoothing)
    wrapped = DistributedDataParallel(model) if processes.size > 1 else model
    wrapped.train()
    began = time.monotonic()
    for images, labels in loader:
        criterion(wrapped(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(dataset) / (time.monotonic() - began)


def table(results: dict[int, dict[str, list[float]]], model: str) -> str:
    """Return medians, and the median over the rounds of the ratio to the loop by hand."""
    rows: list[tuple[str, ...]] = [("processes", "way", "images/s", "of by hand")]
    for count, rates in results.items():
        for way, values in rates.items():
            ratios = [a / b for a, b in zip(values, rates["by hand"], strict=True)]
            rows.append(
                (
                    str(count),
                    way,
                    f"{statistics.median(values):.1f}",
                    f"{statistics.median(ratios):.3f}",
                )
            )
    return "\n".join([f"{model}, one epoch, on the CPU", *format_table(rows)])


if __name__ == "__main__":
    main()
