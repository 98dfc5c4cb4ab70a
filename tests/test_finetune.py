"""The training run, in this process and in ranks that share this one's code."""

from __future__ import annotations

import csv
import dataclasses
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from torch import nn

import bnconvert as bc
from bnconvert.finetune.batches import Plan
from bnconvert.finetune.console import Console
from bnconvert.finetune.options import settings_options, to_arguments
from bnconvert.finetune.processes import Processes
from bnconvert.finetune.run import run
from bnconvert.finetune.settings import Settings
from bnconvert.finetune.training import StoppedError, Trainer
from bnconvert.testing import run_ranks
from tests.shapes import CLASSES

if TYPE_CHECKING:
    from pathlib import Path
from tests.finetune_support import (
    MODEL,
    assert_equal_weights,
    losses,
    run_here,
    run_on_rank,
    settings,
    weights,
)


def test_a_run_learns_and_leaves_a_plain_model_that_timm_loads(
    images: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    plot = str(tmp_path / "curves.svg")
    summary = run_here(settings(images, output, epochs=12, lr=0.01, no_aug=True, plot=plot))
    assert summary["final"]["images"] == 15
    assert summary["final"]["top1"] > 0.6
    model = timm.create_model(f"local-dir:{output}", pretrained=True)
    assert model.num_classes == 3
    assert model.pretrained_cfg["input_size"] == (3, 32, 32)
    assert not bc.is_synchronized(bc.load_model(output))
    assert {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {nn.BatchNorm2d}
    assert json.loads((output / "summary.json").read_text()) == summary
    assert json.loads((output / "config.json").read_text())["label_names"] == sorted(CLASSES)
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    with (output / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(1, 13)]
    assert float(rows[-1]["loss"]) == pytest.approx(summary["final"]["loss"], abs=1e-5)


def test_two_synchronised_processes_track_one_plain_process(images: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"epochs": 7, "lr": 0.001, "img_size": 64}
    alone = settings(images, tmp_path / "one", norm="plain", batch_size=16, **common)
    shared = settings(images, tmp_path / "two", norm="sync", batch_size=8, **common)
    run_here(alone)
    run_ranks(run_on_rank, 2, shared)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == len(two) == 21  # the last batch of each epoch is 5 and 5 images
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4


class _Stop:
    """Asks for a stop when the given number of updates is done, in any run."""

    def __init__(self, after: int) -> None:
        self.left = after

    def asked(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("after", [1, 5, 8])
@pytest.mark.parametrize("extra", [{}, {"ema": True, "opt": "adamw", "accumulate": 2}])
def test_a_stopped_run_goes_on_bit_for_bit(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    extra: dict[str, Any],
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(settings(images, whole, **extra))
    stop = _Stop(min(after, 4) if "accumulate" in extra else after)
    with monkeypatch.context() as patch:
        patch.setattr(Processes, "any_stops", lambda processes: stop.asked())
        with pytest.raises(StoppedError, match="--resume"):
            run_here(settings(images, parts, **extra))
    run_here(settings(images, parts, resume=True, **extra))
    assert_equal_weights(whole, parts)
    assert losses(whole) == losses(parts)


def test_resuming_before_the_first_checkpoint_starts_at_the_beginning(
    images: Path, tmp_path: Path
) -> None:
    summary = run_here(settings(images, tmp_path / "run", epochs=1, resume=True))
    assert len(summary["epochs"]) == 1


def test_a_run_is_not_resumed_with_other_settings_or_other_data(
    images: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    asked = settings(images, output, epochs=1)
    run_here(asked)
    with pytest.raises(bc.BnconvertError, match=r"--lr was 0\.05 and is 0\.1"):
        run_here(dataclasses.replace(asked, lr=0.1, resume=True))
    with pytest.raises(bc.BnconvertError, match="not empty"):
        run_here(asked)
    (output / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(bc.BnconvertError, match="is damaged"):
        run_here(dataclasses.replace(asked, resume=True))


@pytest.mark.parametrize("norm", ["sync", "plain", "frozen"])
def test_two_processes_and_an_uneven_last_batch_work_in_every_mode(
    images: Path, tmp_path: Path, norm: str
) -> None:
    asked = settings(
        images, tmp_path / "run", norm=norm, epochs=1, batch_size=4, recalibrate=2, accumulate=2
    )
    summaries = run_ranks(run_on_rank, 2, asked)
    assert summaries[0]["final"] == summaries[1]["final"]
    assert summaries[0]["recalibration"] == summaries[1]["recalibration"]
    assert summaries[0]["final"]["images"] == 15
    expected = {"sync": (0, 14), "plain": (0, 0), "frozen": (14, 0)}[norm]
    counts = summaries[0]["norm"]
    assert (counts["unfrozen"] > 0, counts["reverted"] > 0) == tuple(n > 0 for n in expected)


def test_frozen_statistics_are_the_ones_from_before(images: Path, tmp_path: Path) -> None:
    before = bc.load_model(MODEL).state_dict()
    run_here(settings(images, tmp_path / "run", norm="frozen", epochs=1))
    after = weights(tmp_path / "run")
    names = [name for name in before if "running_" in name or "num_batches" in name]
    assert names
    assert all(torch.equal(before[name], after[name]) for name in names)


def test_a_pattern_freezes_a_part_and_an_unknown_pattern_is_refused(
    images: Path, tmp_path: Path
) -> None:
    asked = settings(images, tmp_path / "run", freeze=("layer1.*", "bn1"), epochs=1)
    prepared = run_here(asked)["prepared"]["layers"]
    frozen = {layer["name"] for layer in prepared if layer["outcome"] == "frozen"}
    assert "bn1" in frozen
    assert all(name == "bn1" or name.startswith("layer1.") for name in frozen)
    assert {layer["outcome"] for layer in prepared} == {"frozen", "converted"}
    with pytest.raises(bc.BnconvertError, match="'blocks"):
        run_here(settings(images, tmp_path / "other", freeze=("blocks.*",)))


def test_gradient_accumulation_equals_the_larger_batch_where_statistics_are_frozen(
    images: Path, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"norm": "frozen", "no_aug": True}
    run_here(settings(images, tmp_path / "large", batch_size=8, **common))
    run_here(settings(images, tmp_path / "small", batch_size=4, accumulate=2, **common))
    large, small = losses(tmp_path / "large"), losses(tmp_path / "small")
    assert large == pytest.approx(small, abs=1e-5)


def test_the_onnx_file_is_evaluated_by_itself(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    summary = run_here(settings(images, tmp_path / "run", epochs=1, export=str(path)))
    assert summary["onnx"]["top1"] == summary["final"]["top1"]
    assert summary["onnx"]["loss"] == pytest.approx(summary["final"]["loss"], abs=1e-4)


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": "/nowhere/at/all"}, "there is no such folder"),
    "small head": ({"num_classes": 2}, "--num-classes: is 2 but the data has 3 classes"),
    "no GPU": ({"amp": True}, "--amp: needs a GPU"),
    "no such model": ({"model": "resnet1818"}, "did you mean"),
    "no such optimizer": ({"opt": "nosuch"}, "--opt: timm does not make 'nosuch'"),
    "no such schedule": ({"sched": "nosuch"}, "--sched: timm does not make 'nosuch'"),
    "no such policy": ({"aa": "nonsense"}, "--aa: 'nonsense' is no policy"),
    "export to a folder": ({"export": "/"}, "--export: / is a folder"),
    "divergence": ({"lr": 1e30, "sched": "none"}, "loss of epoch 1"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="one case is about a machine without a GPU")
@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_refused(images: Path, tmp_path: Path, case: str) -> None:
    changes, message = BAD_SETTINGS[case]
    with pytest.raises(bc.BnconvertError, match=message):
        run_here(settings(images, tmp_path / "run", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs: is 0"),
        ({"norm": "group"}, "--norm: is 'group'"),
        ({"val_fraction": 1.0}, "--val-fraction"),
        ({"resume": True, "force": True}, "--resume"),
        ({"plot": "curves.pdf"}, "--plot"),
        ({"lr": -1.0}, "--lr: is -1.0; give 0 to"),
        ({"lr": float("nan")}, "--lr: is nan"),
        ({"momentum": -1.0}, "--momentum"),
        ({"weight_decay": -1.0}, "--weight-decay"),
        ({"clip_grad": -1.0}, "--clip-grad: is -1.0; give a number above 0"),
        ({"smoothing": 1.5}, "--smoothing"),
        ({"hflip": 2.0}, "--hflip"),
        ({"reprob": 3.0}, "--reprob"),
        ({"ema_decay": 2.0}, "--ema-decay"),
        ({"warmup_epochs": -1}, "--warmup-epochs"),
        ({"workers": -1}, "--workers"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**32}, "--seed"),
        ({"scale": (0.9, 0.1)}, "--scale: is 0.9 0.1"),
        ({"scale": (0.0, 0.0)}, "--scale: is 0.0 0.0"),
    ],
)
def test_contradictory_settings_are_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(bc.BnconvertError, match=message):
        Settings(model=MODEL, data="d", output="o", **changes)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("images_count", [37, 48])
def test_every_image_is_in_one_part_and_the_parts_make_the_global_batch(
    size: int, images_count: int
) -> None:
    plans = [Plan(images_count, 4, 2, 1, rank, size, 5) for rank in range(size)]
    alone = Plan(images_count, 4 * size, 2, size, 0, 1, 5)
    parts = [list(plan.epoch(3)) for plan in plans]
    for update, whole in enumerate(alone.epoch(3)):
        for place, micro in enumerate(whole):
            shares = [part[update][place] for part in parts]
            assert sum((share.keys for share in shares), ()) == micro.keys
            lengths = [len(share.keys) for share in shares]
            assert max(lengths) - min(lengths) <= 1
        weight = sum(m.weight for part in parts for m in part[update])
        assert weight == pytest.approx(size)
    assert len(parts[0]) == plans[0].updates
    assert list(plans[0].epoch(3, start=1)) == parts[0][1:]
    assert next(plans[0].epoch(4)) != parts[0][0]


def test_the_command_line_of_settings_gives_the_settings_back() -> None:
    import click

    caught: list[Settings] = []

    @click.command
    @settings_options
    def command(**options: Any) -> None:
        caught.append(Settings(**options))

    asked = Settings(
        model="m", data="d", output="o", freeze=("a.*", "b"), scale=(0.2, 0.9), ema=True, epochs=3
    )
    command.main(to_arguments(asked), standalone_mode=False)
    command.main(["m", "--data", "d", "-o", "o"], standalone_mode=False)
    assert caught == [asked, Settings(model="m", data="d", output="o")]
    assert Settings.from_dict(json.loads(json.dumps(asked.to_dict()))) == asked


def test_a_signal_saves_the_state_after_the_update(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bnconvert.finetune.processes import joined

    step = Trainer._step

    def interrupt(trainer: Trainer) -> None:
        step(trainer)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "_step", interrupt)
    asked = settings(images, tmp_path / "run")
    with joined() as processes, pytest.raises(StoppedError, match="epoch 1 after update 1"):
        run(asked, processes, Console(shown=False, epochs=2))
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert (state["progress"]["epoch"], state["progress"]["update"]) == (0, 1)
