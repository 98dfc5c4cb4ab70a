"""What tests of training runs share: a small run, and what it wrote."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import torch

import bnconvert as bc
from bnconvert.finetune.console import Console
from bnconvert.finetune.processes import Processes
from bnconvert.finetune.run import run
from bnconvert.finetune.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


MODEL = "test_resnet"


def settings(images: Path, output: Path, **changes: Any) -> Settings:
    defaults: dict[str, Any] = {
        "model": MODEL,
        "data": str(images),
        "output": str(output),
        "epochs": 2,
        "batch_size": 8,
        "img_size": 32,
        "workers": 0,
        "lr": 0.05,
    }
    return Settings(**{**defaults, **changes})


def run_here(asked: Settings) -> dict[str, Any]:
    processes = Processes.present(torch.device("cpu"), 1)
    return run(asked, processes, Console(shown=False, epochs=asked.epochs))


def run_on_rank(rank: int, asked: Settings) -> dict[str, Any]:
    return run_here(asked)


def losses(output: Path) -> list[float]:
    with (output / "updates.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return bc.load_model(output).state_dict()


def assert_equal_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
