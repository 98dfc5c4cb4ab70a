"""`bnconvert recalibrate`, and what `bnconvert finetune` refuses before it starts anything."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import bnconvert as bc
from bnconvert.cli.main import main
from bnconvert.finetune.recalibration import open_loader
from tests.shapes import write_shapes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"))


def invoke(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path
) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["bnconvert", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_recalibrate_writes_a_folder_with_the_statistics_of_the_images(
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, output = tmp_path / "start", tmp_path / "out"
    torch.manual_seed(0)
    model = bc.load_model("test_resnet")
    bc.save_model(model, start)
    arguments = ("recalibrate", start, "--data", images, "-o", output, "--img-size", "32")
    code, out, _ = invoke(capsys, monkeypatch, *arguments, "--dry-run")
    assert code == 0
    assert out.startswith("recalibrate: 15 rewritten")
    assert not output.exists()
    code, out, _ = invoke(capsys, monkeypatch, *arguments, "--json")
    assert code == 0
    shifts = json.loads(out)["shifts"]
    assert len(shifts) == 15
    loader, _ = open_loader(model, str(images), batch_size=42, img_size=32)
    (batch,) = [inputs for inputs, _ in loader]
    first = model.get_submodule("conv1.0")(batch).double()
    norm = bc.load_model(output).get_submodule("conv1.1")
    var, mean = torch.var_mean(first, dim=(0, 2, 3))
    torch.testing.assert_close(norm.running_mean, mean.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, var.float(), rtol=1e-4, atol=1e-5)


def test_bad_input_is_one_line_and_an_exit_code(
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "there").mkdir()
    recalibrate = ("recalibrate", "test_resnet", "--data")
    finetune = ("finetune", "test_resnet", "--data", images, "-o", tmp_path / "run")
    cases: list[tuple[int, str, tuple[str | Path, ...]]] = [
        (1, "there is no such folder", (*recalibrate, tmp_path / "no", "-o", tmp_path / "out")),
        (1, "exists", (*recalibrate, images, "-o", tmp_path / "there")),
        (
            1,
            "num_batches is 99",
            (*recalibrate, images, "-o", tmp_path / "out", "--num-batches", "99"),
        ),
        (2, "--epochs: is 0", (*finetune, "--epochs", "0")),
        (2, "--resume: cannot be combined", (*finetune, "--resume", "--force")),
        (2, "'group' is not one of", (*finetune, "--norm", "group")),
    ]
    for code, text, arguments in cases:
        ended, out, err = invoke(capsys, monkeypatch, *arguments)
        assert (ended, out) == (code, ""), (arguments, err)
        assert text in err
        assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "run").exists()
