"""The model of a training run: its head, its weights, its norm layers, its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from torch import nn

import bnconvert as bc
from bnconvert.finetune.console import Console
from bnconvert.finetune.network import (
    Head,
    build_model,
    check_forward,
    fit_head,
    prepare_norms,
)
from bnconvert.finetune.processes import Processes
from bnconvert.finetune.run import run
from bnconvert.report import Outcome

if TYPE_CHECKING:
    from pathlib import Path
from tests.finetune_support import MODEL, run_here, settings, weights


def test_plain_training_of_a_folder_that_was_saved_synchronised(
    images: Path, tmp_path: Path
) -> None:
    model = bc.convert_sync_batchnorm(timm.create_model(MODEL, num_classes=3))
    bc.save_model(model, tmp_path / "sync")
    asked = settings(images, tmp_path / "run", model=str(tmp_path / "sync"), norm="plain")
    loaded = build_model(asked)
    assert bc.is_synchronized(loaded)
    report = prepare_norms(loaded, asked)
    assert not bc.is_synchronized(loaded)
    assert report.count(Outcome.REVERTED) == len(report.layers) > 0


def test_plain_training_says_so_of_each_layer(images: Path, tmp_path: Path) -> None:
    asked = settings(images, tmp_path / "run", norm="plain", freeze=("bn1",))
    report = prepare_norms(build_model(asked), asked)
    assert report.count(Outcome.FROZEN) == 1
    assert {layer.reason for layer in report.left} == {"--norm plain leaves it as it is"}


class Odd(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) + 1.0


def test_unknown_layers_are_refused_with_advice_that_fits(images: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), Odd(3))
    with pytest.raises(bc.BnconvertError, match=r"\(1: .*\); train with --norm plain or --norm f"):
        prepare_norms(model, settings(images, tmp_path / "run", norm="sync"))
    assert not bc.is_synchronized(model)
    prepare_norms(model, settings(images, tmp_path / "run", norm="plain"))


class FailsInTraining(nn.Module):
    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.AvgPool2d(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x).flatten(1)
        return scores @ torch.ones(4, 3) if self.training else scores


def test_a_forward_that_fails_in_training_mode_is_one_line(images: Path, tmp_path: Path) -> None:
    asked = settings(images, tmp_path / "run", model=f"{__name__}:FailsInTraining")
    refusal = (
        r"training mode on a batch of shape \(8, 3, 32, 32\) at .*test_finetune_network.py:\d+"
    )
    with pytest.raises(bc.BnconvertError, match=refusal):
        run_here(asked)


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


def test_a_run_refuses_a_model_without_scores_before_it_trains(
    images: Path, tmp_path: Path
) -> None:
    asked = settings(images, tmp_path / "run", model=f"{__name__}:TwoOutputs")
    with pytest.raises(bc.BnconvertError, match="model: gives tuple for an image"):
        run_here(asked)


@pytest.mark.parametrize("given", [True, False])
def test_a_run_says_that_weights_are_random(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: bool
) -> None:
    torch.save(timm.create_model(MODEL).state_dict(), tmp_path / "given.pt")
    checkpoint = str(tmp_path / "given.pt") if given else None
    asked = settings(images, tmp_path / "run", epochs=1, checkpoint=checkpoint)
    run(asked, Processes.present(torch.device("cpu"), 1), Console(shown=True, epochs=1))
    shown = capsys.readouterr().err
    assert ("starts from random weights" in shown) is not given


def test_a_run_says_that_it_recalibrates_on_fewer_batches(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = settings(images, tmp_path / "run", epochs=1, recalibrate=1000)
    run(asked, Processes.present(torch.device("cpu"), 1), Console(shown=True, epochs=1))
    shown = " ".join(capsys.readouterr().err.split())
    assert "--recalibrate: is 1000 but each process has images for" in shown


class AuxiliaryLast(nn.Module):
    """The layer registered last is not the one that gives the scores, as in torchvision's nets."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.scores = nn.Linear(3, outputs)
        self.aux = nn.Linear(3, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).mean((2, 3))
        scores: torch.Tensor = self.scores(y) + (0 * self.aux(y).sum() if self.training else 0)
        return scores


def four_outputs() -> nn.Module:
    return AuxiliaryLast(4)


def test_outputs_are_counted_where_they_come_out(images: Path, tmp_path: Path) -> None:
    asked = settings(images, tmp_path / "run", model=f"{__name__}:AuxiliaryLast", epochs=1)
    assert run_here(asked)["head"] == "head kept: 3 outputs"
    other = settings(images, tmp_path / "other", model=f"{__name__}:four_outputs")
    with pytest.raises(bc.BnconvertError, match="has 4 outputs but 3 are wanted"):
        run_here(other)


def replaced_head() -> Any:
    model = timm.create_model(MODEL)
    model.fc = nn.Linear(96, 3)
    assert model.num_classes == 1000
    return model


def test_a_head_that_was_replaced_by_hand_is_kept(images: Path, tmp_path: Path) -> None:
    asked = settings(images, tmp_path / "run", model=f"{__name__}:replaced_head", epochs=1)
    assert fit_head(replaced_head(), asked, 3, (3, 32, 32)) == Head(3, 3, new=False)
