"""`bnconvert fold-onnx`: the command, hostile files and a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper

from bnconvert.cli.main import group
from bnconvert.errors import BnconvertError
from bnconvert.export import fold_onnx
from bnconvert.report import Outcome
from tests.onnx_graph import C, Graph, count
from tests.test_fold_onnx import build_conv
from tests.test_fold_onnx_left import left_two_readers


def test_command_writes_reports_and_refuses(tmp_path: Path) -> None:
    g = Graph()
    source = str(g.save(tmp_path / "in.onnx", left_two_readers(g), shape=("n", C, "h", "w")))
    out = tmp_path / "out.onnx"

    def run(*args: str) -> Any:
        return CliRunner().invoke(group, ("fold-onnx", *args))

    result = run(source, "-o", str(out), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "is also read by" in result.stdout
    assert not out.exists()
    result = run(source, "-o", str(out), "--shape", "x:3,6,10,12", "--strict")
    assert result.exit_code == 3
    assert out.exists()
    for args, message in [
        ((source, "-o", str(out)), "exists"),
        ((source, "-o", source, "--force"), "is the input itself"),
        ((source, "-o", str(out), "--force", "--shape", "y:1"), "has no input y"),
        ((source, "-o", str(out), "--force", "--shape", "x"), "is not NAME:N,N"),
        ((str(tmp_path / "no"), "-o", str(tmp_path / "b")), "no such file"),
    ]:
        error = run(*args).exception
        assert isinstance(error, BnconvertError)
        assert message in str(error)


def spoil(path: Path, kind: str) -> None:
    """Damage a good file, or put something else in its place."""
    content, model = path.read_bytes(), onnx.load(path)
    if kind == "text":
        path.write_text("no model\n" * 9)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "without its weights":
        onnx.save(model, path, save_as_external_data=True, location="w", size_threshold=0)
        (path.parent / "w").unlink()
    elif kind == "negative variance":
        values = numpy_helper.to_array(model.graph.initializer[-1]).copy()
        values[2] = -1.0
        model.graph.initializer[-1].raw_data = values.tobytes()
        onnx.save(model, path)
    elif kind == "unknown operator":
        model.graph.node[0].op_type = "Convolve"
        onnx.save(model, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "in.onnx: is not an ONNX model"),
        ("empty", "in.onnx: holds no graph"),
        ("truncated", "in.onnx: is not an ONNX model"),
        ("without its weights", "in.onnx: its weights are in w, which is not there"),
        ("negative variance", "BatchNormalization n1: its scale: channel 2 has the value nan"),
        ("unknown operator", "Convolve"),
    ],
)
def test_hostile_files_get_one_line(
    tmp_path: Path, kind: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)])
    spoil(source, kind)
    with pytest.raises(BnconvertError) as caught:
        fold_onnx(source, tmp_path / "out.onnx")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]
    assert capfd.readouterr() == ("", "")


def test_the_ocr_classifier_loses_its_35_norms(tmp_path: Path) -> None:
    import importlib.util

    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    assert spec is not None, "pip install --no-deps -r tests/specimens.txt"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models"
    source = folder / "ch_ppocr_mobile_v2.0_cls_infer.onnx"
    report = fold_onnx(source, tmp_path / "cls.onnx", shapes={"x": (2, 3, 48, 192)})
    assert report.count(Outcome.FOLDED) == 35
    assert count(tmp_path / "cls.onnx") == 0
    assert report.float64 is not None
    assert report.float64 < 1e-12
    images = torch.rand(3, 3, 48, 192).numpy() * 2 - 1
    results = [session(path, images) for path in (source, tmp_path / "cls.onnx")]
    assert np.abs(results[0] - results[1]).max() < 1e-6


def session(path: Path, images: np.ndarray) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    runner = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = runner.run(None, {"x": images})[0]
    return result
