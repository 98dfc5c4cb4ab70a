"""The training run, in this process and in ranks that share this one's code."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import bnconvert as bc
from bnconvert.finetune.batches import Plan
from bnconvert.finetune.console import Console
from bnconvert.finetune.network import build_model, check_forward, prepare_norms
from bnconvert.finetune.options import settings_options, to_arguments
from bnconvert.finetune.processes import Processes
from bnconvert.finetune.run import run
from bnconvert.finetune.settings import Settings
from bnconvert.finetune.sources import open_sources, read_image
from bnconvert.finetune.training import StoppedError, Trainer
from bnconvert.testing import run_ranks
from tests.shapes import CLASSES, draw_shape, write_shapes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = "test_resnet"


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"))


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


def test_a_run_learns_and_leaves_a_plain_model_that_timm_loads(
    images: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    asked = settings(images, output, epochs=6, no_aug=True, plot=str(tmp_path / "curves.svg"))
    summary = run_here(asked)
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
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
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


def test_a_timm_dataset_is_opened_by_its_name(images: Path, tmp_path: Path) -> None:
    asked = settings(images, tmp_path / "run", data="torch/image_folder", epochs=1)
    summary = run_here(dataclasses.replace(asked, data_root=str(images)))
    assert (summary["training_images"], summary["final"]["images"]) == (42, 15)
    assert summary["classes"] == sorted(CLASSES)
    with pytest.raises(bc.BnconvertError, match="timm cannot open it"):
        run_here(settings(images, tmp_path / "other", data="torch/nothing"))


def test_a_part_of_each_class_is_held_out_without_a_validation_folder(
    images: Path, tmp_path: Path
) -> None:
    summary = run_here(settings(images / "train", tmp_path / "run", epochs=1))
    assert (summary["training_images"], summary["final"]["images"]) == (33, 9)


def spoil(folder: Path, kind: str) -> None:
    if kind == "empty class":
        (folder / "train" / "zigzag").mkdir()
    elif kind == "bad image":
        (folder / "train" / "bar" / "bad.png").write_bytes(b"no image")
        whole = (folder / "train" / "bar" / "0.png").read_bytes()
        (folder / "val" / "bar" / "cut.png").write_bytes(whole[: len(whole) // 2])
    elif kind == "one class":
        for part in ("train", "val"):
            for other in sorted((folder / part).iterdir())[1:]:
                shutil.rmtree(other)
    elif kind == "parts":
        (folder / "train").rename(folder / "training")
        (folder / "val").rename(folder / "validation")
    elif kind == "unknown class":
        (folder / "val" / "zigzag").mkdir()
        draw_shape("bar", torch.Generator()).save(folder / "val" / "zigzag" / "0.png")


@pytest.fixture
def own_images(images: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        folder = tmp_path / "images"
        shutil.copytree(images, folder)
        spoil(folder, kind)
        return folder

    return make


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty class", "zigzag: holds no image"),
        ("bad image", r"2 images cannot be read .*bad\.png.*cut\.png.*--skip-bad-images"),
        ("unknown class", "zigzag is not among the training classes"),
        ("one class", "holds one class"),
        ("parts", "training, validation look like parts of the data"),
    ],
)
def test_bad_data_is_refused_with_what_is_wrong(
    own_images: Callable[[str], Path], tmp_path: Path, kind: str, message: str
) -> None:
    with pytest.raises(bc.BnconvertError, match=message):
        run_here(settings(own_images(kind), tmp_path / "run"))


def test_bad_images_are_left_out_and_named_when_asked(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("bad image")
    summary = run_here(settings(folder, tmp_path / "run", epochs=1, skip_bad_images=True))
    assert [path.rsplit("/", 1)[1] for path in summary["skipped_images"]] == ["bad.png", "cut.png"]
    assert (summary["training_images"], summary["final"]["images"]) == (42, 15)


def test_every_usual_kind_of_image_counts_and_hidden_files_do_not(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("as it is")
    kinds = (".webp", ".bmp", ".tif", ".gif", ".ppm")
    for kind in kinds:
        draw_shape("bar", torch.Generator()).save(folder / "train" / "bar" / f"other{kind}")
    hidden = folder / "train" / "bar" / ".ipynb_checkpoints"
    hidden.mkdir()
    draw_shape("bar", torch.Generator()).save(hidden / "0-checkpoint.png")
    source, _ = open_sources(str(folder), None, 0.2)
    assert len(source) == 42 + len(kinds)


def test_floating_point_images_are_refused_by_name(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "float.tif")
    with pytest.raises(bc.BnconvertError, match=r"float.tif: cannot be read .*floating point"):
        read_image(str(tmp_path / "float.tif"))


def test_hidden_folders_are_no_classes(own_images: Callable[[str], Path]) -> None:
    folder = own_images("hidden")
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    (folder / "val" / "__MACOSX").mkdir()
    train, validation = open_sources(str(folder), None, 0.2)
    assert train.classes == validation.classes == tuple(sorted(CLASSES))


def test_plain_training_of_a_folder_that_was_saved_synchronised(
    images: Path, tmp_path: Path
) -> None:
    model = bc.convert_sync_batchnorm(timm.create_model(MODEL, num_classes=3))
    bc.save_model(model, tmp_path / "sync")
    asked = settings(images, tmp_path / "run", model=str(tmp_path / "sync"), norm="plain")
    loaded = build_model(asked)
    assert bc.is_synchronized(loaded)
    prepare_norms(loaded, asked)
    assert not bc.is_synchronized(loaded)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Flatten())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x), x


def test_a_model_that_does_not_run_or_gives_no_scores_is_refused_in_one_line() -> None:
    model = TwoOutputs().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(bc.BnconvertError, match="model: gives tuple for an image"):
        check_forward(model, (3, 8, 8))
    with pytest.raises(bc.BnconvertError, match=r"does not run on an image of 4x8x8"):
        check_forward(model, (4, 8, 8))
    with pytest.raises(bc.BnconvertError, match=r"model: gives \(1, 3, 8, 8\) for an image"):
        check_forward(model.layers[:2], (3, 8, 8))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "deep.png")
    read = np.asarray(read_image(str(tmp_path / "deep.png")))
    assert np.abs(read[..., 0] - values / 256.0).max() <= 1.0


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
        ({"scale": (0.9, 0.1)}, "--scale: is 0.9 0.1"),
        ({"scale": (0.0, 0.0)}, "--scale: is 0.0 0.0"),
    ],
)
def test_contradictory_settings_are_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(bc.BnconvertError, match=message):
        Settings(model=MODEL, data="d", output="o", **changes)


def test_the_head_is_kept_where_it_fits_and_reported_where_it_does_not(
    images: Path, tmp_path: Path
) -> None:
    first = run_here(settings(images, tmp_path / "first", epochs=1))
    assert first["head"] == "head initialised anew: 1000 outputs became 3"
    again = settings(images, tmp_path / "again", epochs=1, model=str(tmp_path / "first"))
    assert run_here(again)["head"] == "head kept: 3 outputs"


@pytest.mark.parametrize("outputs", [3, 5])
def test_a_checkpoint_may_have_the_head_that_is_wanted(
    images: Path, tmp_path: Path, outputs: int
) -> None:
    source = timm.create_model(MODEL, num_classes=outputs)
    torch.save(source.state_dict(), tmp_path / "own.pt")
    asked = settings(
        images,
        tmp_path / "run",
        epochs=1,
        lr=0.0,
        norm="frozen",
        checkpoint=str(tmp_path / "own.pt"),
        num_classes=5 if outputs == 5 else None,
    )
    assert run_here(asked)["head"] == f"head kept: {outputs} outputs"
    saved = weights(tmp_path / "run")
    assert all(torch.equal(saved[name], value) for name, value in source.state_dict().items())


def test_a_checkpoint_with_neither_head_is_refused_as_it_was_given(
    images: Path, tmp_path: Path
) -> None:
    torch.save(timm.create_model(MODEL, num_classes=7).state_dict(), tmp_path / "own.pt")
    asked = settings(images, tmp_path / "run", checkpoint=str(tmp_path / "own.pt"))
    with pytest.raises(bc.BnconvertError, match=r"own.pt: .*\[7, \d+\] for \[1000, "):
        run_here(asked)


def test_more_processes_than_images_is_refused_on_every_rank(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("")
    for path in (folder / "train").glob("*/*.png"):
        if path.stem != "0":
            path.unlink()
    asked = settings(folder, tmp_path / "run", norm="plain")
    texts = run_ranks(refusal, 2, asked)
    assert texts[0] == texts[1]
    assert "3 training images are too few for 2 processes" in texts[0]


def refusal(rank: int, asked: Settings) -> str:
    with pytest.raises(bc.BnconvertError) as caught:
        run_here(asked)
    return str(caught.value)


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
