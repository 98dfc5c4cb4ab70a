"""`bnconvert export` and `bnconvert compare` as a user calls them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from timm.data import create_transform
from torch import nn

from bnconvert import export_onnx
from bnconvert.cli.main import group
from bnconvert.errors import BnconvertError
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from pathlib import Path


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 7),
    )
    randomize_batchnorm(model)
    model.pretrained_cfg = {  # type: ignore[assignment]  # what timm's models carry
        "architecture": "tiny",
        "input_size": (3, 16, 16),
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.4),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "label_names": list("abcdefg"),
    }
    return model


MODEL = f"{__name__}:make_model"


def run(*args: str) -> Result:
    return CliRunner().invoke(group, args)


def photos(folder: Path) -> Path:
    folder.mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def test_export_prints_its_table_and_the_file_equals_the_model(tmp_path: Path) -> None:
    path = str(tmp_path / "tiny.onnx")
    result = run("export", MODEL, "-o", path)
    assert result.exit_code == 0, result.output
    assert "verified in onnxruntime" in result.stdout
    result = run("compare", MODEL, path, "--images", str(photos(tmp_path / "photos")), "--json")
    assert result.exit_code == 0, result.output
    comparison = json.loads(result.stdout)
    assert comparison["inputs"] == "3 images"
    assert comparison["largest_difference"] < 1e-5
    assert comparison["top1"] == 1.0


def test_dry_run_proves_everything_and_writes_nothing(tmp_path: Path) -> None:
    result = run("export", MODEL, "-o", str(tmp_path / "tiny.onnx"), "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert len(report["checks"]) == 6
    assert report["fold"]["counts"] == {"folded": 1}
    assert "dry run: nothing was written" in report["notes"]
    assert not list(tmp_path.iterdir())


def test_preprocess_in_the_file_is_that_of_timm_to_the_last_bit(tmp_path: Path) -> None:
    """The first layer copies its input, so that the file's output is the normalised image."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False))
    net[0].weight = nn.Parameter(torch.eye(3).view(3, 3, 1, 1))
    config = {"input_size": (3, 256, 16), "mean": (0.485, 0.456, 0.406), "std": (0.2, 0.3, 0.4)}
    net.pretrained_cfg = {**config, "crop_pct": 1.0}  # type: ignore[assignment]
    export_onnx(net, tmp_path / "m.onnx", preprocess=True)
    pixels = np.random.default_rng(0).integers(0, 256, (256, 16, 3), dtype=np.uint8)
    pixels[:, 0, :] = np.arange(256, dtype=np.uint8)[:, None]
    transform = create_transform(
        (3, 256, 16), mean=config["mean"], std=config["std"], crop_pct=1.0, is_training=False
    )
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (entry,) = session.get_inputs()
    (result,) = session.run(None, {entry.name: pixels[None]})
    assert entry.type == "tensor(uint8)"
    expected = transform(Image.fromarray(pixels))
    torch.testing.assert_close(torch.from_numpy(result[0]), expected, rtol=0, atol=0)


def test_file_with_preprocess_and_softmax_pairs_with_the_model_and_itself(tmp_path: Path) -> None:
    raw, plain = str(tmp_path / "raw.onnx"), str(tmp_path / "plain.onnx")
    common = ("export", MODEL, "--softmax", "--static-batch", "--batch-size", "3")
    assert run(*common, "-o", raw, "--with-preprocess").exit_code == 0
    assert run(*common, "-o", plain).exit_code == 0
    result = run("compare", raw, plain, "--images", str(photos(tmp_path / "photos")), "--json")
    assert json.loads(result.stdout)["largest_difference"] < 1e-6
    result = run("compare", raw, MODEL, "--images", str(tmp_path / "photos"))
    assert result.exit_code == 1  # probabilities against scores
    assert "differ by more than --tolerance" in result.stderr


def test_metadata_tells_a_server_everything(tmp_path: Path) -> None:
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    path = tmp_path / "tiny.onnx"
    run("export", MODEL, "--checkpoint", str(tmp_path / "weights.pt"), "-o", str(path))
    entries = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    digest = hashlib.sha256((tmp_path / "weights.pt").read_bytes()).hexdigest()
    assert entries["checkpoint_sha256"] == digest
    assert json.loads(entries["class_names"]) == list("abcdefg")
    assert json.loads(entries["mean"]) == [0.5, 0.4, 0.3]
    assert json.loads(entries["std"]) == [0.2, 0.3, 0.4]
    assert json.loads(entries["input_size"]) == [3, 16, 16]
    assert (entries["color_order"], entries["architecture"]) == ("RGB", "tiny")
    assert (entries["interpolation"], entries["crop_pct"]) == ("bilinear", "1.0")
    run("export", MODEL, "-o", str(path), "--force", "--no-metadata")
    assert not onnx.load(path).metadata_props


def test_layers_are_listed_and_drawn(tmp_path: Path) -> None:
    path, picture = str(tmp_path / "tiny.onnx"), tmp_path / "error.svg"
    run("export", MODEL, "-o", path)
    result = run("compare", path, MODEL, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    rows = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")]
    assert rows.index("1") < rows.index("2") < rows.index("5")
    assert picture.read_text().lstrip().startswith("<?xml")
    assert run("compare", path, MODEL, "--plot", str(picture)).exception is not None
    assert run("compare", path, MODEL, "--plot", str(picture), "--force").exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("export", MODEL, "-o", "{tmp}/none/a.onnx"), "there is no folder"),
        (("export", MODEL, "-o", "{tmp}/a.onnx", "--opset", "3"), "opset: 3 is not known to onnx"),
        (("export", MODEL, "-o", "{tmp}/a.onnx", "--tolerance", "0"), "accepted is 0.0e"),
        (("compare", MODEL, "{tmp}/none.onnx"), "no such file"),
        (("compare", MODEL, MODEL, "--images", "{tmp}/none"), "no such folder"),
        (("compare", MODEL, MODEL, "--plot", "{tmp}/a.gif"), "is not a .svg or .png"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = run(*(arg.format(tmp=tmp_path) for arg in args))
    assert isinstance(result.exception, BnconvertError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir())
