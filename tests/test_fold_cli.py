"""`bnconvert fold`, run as a user runs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from bnconvert import load_model, save_model
from bnconvert.cli.main import group
from bnconvert.errors import BnconvertError
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "test_efficientnet"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(group, ["fold", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = load_model(MODEL)
    randomize_batchnorm(model)
    path = tmp_path_factory.mktemp("fold") / "model"
    save_model(model, path)
    return path


def test_a_folder_is_folded_written_and_loaded_again(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "folded"
    result = run(str(folder), "-o", str(output), "--json", "--time", "--strict")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert set(answer["counts"]) == {"folded"}
    assert answer["proof"]["float64"] < 1e-9
    assert answer["layer_count"]["before"] > answer["layer_count"]["after"]
    assert answer["latency"]["after_s"] > 0
    original, folded = load_model(str(folder)).eval(), load_model(str(output)).eval()
    assert not [m for m in folded.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(folded(images), original(images), rtol=1e-4, atol=1e-4)


def test_a_table_names_what_stays_and_why(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "folded"
    result = run(str(folder), "-o", str(output), "--dry-run", "--exclude", "bn1", "--no-verify")
    assert result.exit_code == 0
    assert not output.exists()
    lines = result.stdout.splitlines()
    assert any("bn1" in line and "left" in line and "excluded by 'bn1'" in line for line in lines)
    assert "not verified" in result.stdout
    assert "layers: " in result.stdout
    strict = run(str(folder), "-o", str(output), "--dry-run", "--exclude", "bn1", "--strict")
    assert strict.exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--input-size", "224"], "--input-size 224: is not of the form CxHxW"),
        (["--input-size", "5x64x64"], "does not run on example_inputs"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, arguments: list[Any], text: str
) -> None:
    with pytest.raises(BnconvertError, match=text):
        run(str(folder), "-o", str(tmp_path / "folded"), *arguments)
    assert not (tmp_path / "folded").exists()


def test_an_existing_output_is_refused_before_any_work(folder: Path) -> None:
    with pytest.raises(BnconvertError, match="exists; use --force"):
        run("no such model", "-o", str(folder))
