"""Weights of Keras, Flax and NumPy files: names, axes and what BatchNorm needs."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
import torch

from bnconvert.checkpoint import convert_checkpoint, load_checkpoint
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path
from tests.checkpoint_support import assert_same, pack

KERNEL = np.arange(2 * 2 * 3 * 4, dtype=np.float32).reshape(2, 2, 3, 4)
NORM = {
    name: np.linspace(low, 2, 4).astype(np.float32)
    for name, low in (("gamma", -1), ("beta", 0), ("moving_mean", -2), ("moving_variance", 0.5))
}


def keras_config() -> dict[str, Any]:
    layers = [
        {"class_name": "Conv2D", "config": {"name": "stem"}},
        {"class_name": "DepthwiseConv2D", "config": {"name": "deep"}},
        {"class_name": "BatchNormalization",
         "config": {"name": "norm", "epsilon": 1e-3, "momentum": 0.99, "axis": [3]}},
    ]  # fmt: skip
    return {"class_name": "Functional", "config": {"name": "m", "layers": layers}}


def check_keras(path: Path, names: tuple[str, str, str], eps: float | None) -> None:
    stem, deep, norm = names
    checkpoint = load_checkpoint(path)
    loaded = checkpoint.tensors
    assert torch.equal(loaded[f"{norm}.running_var"], torch.tensor(NORM["moving_variance"]))
    assert torch.equal(loaded[f"{norm}.weight"], torch.tensor(NORM["gamma"]))
    assert torch.equal(loaded[f"{stem}.kernel"], torch.tensor(KERNEL))
    assert (checkpoint.bn[norm]["eps"].value if eps else None) == eps
    if eps:
        assert checkpoint.bn[norm]["momentum"].value == 0.01
    output = path.with_suffix(".safetensors")
    convert_checkpoint(path, output)
    torch_names = load_checkpoint(output).tensors
    assert torch.equal(torch_names[f"{stem}.weight"], torch.tensor(KERNEL).permute(3, 2, 0, 1))
    depthwise = torch.tensor(KERNEL).permute(2, 3, 0, 1).reshape(12, 1, 2, 2)
    assert torch.equal(torch_names[f"{deep}.weight"], depthwise)


def test_keras_2_models_give_names_axes_eps_and_inverted_momentum(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "k.h5", "w") as file:
        file.attrs["model_config"] = json.dumps(keras_config())
        file["model_weights/stem/stem/kernel:0"] = KERNEL
        file["model_weights/deep/deep/depthwise_kernel:0"] = KERNEL
        for name, value in NORM.items():
            file[f"model_weights/norm/norm_1/{name}:0"] = value
        file["optimizer_weights/Adam/x:0"] = KERNEL
    check_keras(tmp_path / "k.h5", ("stem", "deep", "norm"), 1e-3)


def keras_3_weights(path: Path, norm: list[str]) -> None:
    with h5py.File(path, "w") as file:
        file["layers/conv2d/vars/0"] = KERNEL
        file.create_dataset("layers/depthwise_conv2d/vars/0", data=KERNEL, compression="gzip",
                            chunks=(2, 2, 3, 2))  # fmt: skip
        for index, name in enumerate(norm):
            file[f"layers/batch_normalization/vars/{index}"] = NORM[name]
        file["optimizer/vars/0"] = np.zeros(3)


def test_keras_3_weights_are_told_apart_by_order_or_refused(tmp_path: Path) -> None:
    keras_3_weights(tmp_path / "k.weights.h5", list(NORM))
    names = ("conv2d", "depthwise_conv2d", "batch_normalization")
    check_keras(tmp_path / "k.weights.h5", names, None)
    keras_3_weights(tmp_path / "a.weights.h5", ["beta", "moving_mean", "moving_variance"])
    with pytest.raises(CheckpointError, match="3 variables and no config"):
        load_checkpoint(tmp_path / "a.weights.h5")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_keras_3_archives_use_their_config(tmp_path: Path, compression: int) -> None:
    keras_3_weights(tmp_path / "w.h5", list(NORM))
    config = keras_config()
    with zipfile.ZipFile(tmp_path / "k.keras", "w", compression) as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", "{}")
        archive.write(tmp_path / "w.h5", "model.weights.h5")
    check_keras(tmp_path / "k.keras", ("stem", "deep", "norm"), 1e-3)
    keras_3_weights(tmp_path / "w.h5", ["beta", "moving_mean", "moving_variance"])
    config["config"]["layers"][2]["config"]["scale"] = False
    with zipfile.ZipFile(tmp_path / "s.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.write(tmp_path / "w.h5", "model.weights.h5")
    convert_checkpoint(tmp_path / "s.keras", tmp_path / "s.safetensors")
    loaded = load_checkpoint(tmp_path / "s.safetensors").tensors
    assert loaded["norm.weight"].tolist() == [1] * 4
    assert torch.equal(loaded["norm.bias"], torch.tensor(NORM["beta"]))


def test_flax_trees_get_torch_names_and_axes(tmp_path: Path) -> None:
    big = np.arange(300 * 300, dtype=np.float32).reshape(300, 300)
    chunked = {"__msgpack_chunked_array__": 1, "shape": {"0": 2, "1": 3},
               "chunks": {"0": np.arange(4.0), "1": np.arange(4.0, 6.0)}}  # fmt: skip
    tree = {
        "params": {
            "Conv_0": {"kernel": KERNEL},
            "BatchNorm_0": {"scale": NORM["gamma"], "bias": NORM["beta"]},
            "Dense_0": {"kernel": big},
            "Chunk": {"bias": chunked},
        },
        "batch_stats": {
            "BatchNorm_0": {"mean": NORM["moving_mean"], "var": NORM["moving_variance"]}
        },
    }
    (tmp_path / "f.msgpack").write_bytes(pack(tree))
    assert load_checkpoint(tmp_path / "f.msgpack").format == "Flax msgpack"
    convert_checkpoint(tmp_path / "f.msgpack", tmp_path / "w.safetensors")
    loaded = load_checkpoint(tmp_path / "w.safetensors").tensors
    assert torch.equal(loaded["Conv_0.weight"], torch.tensor(KERNEL).permute(3, 2, 0, 1))
    assert torch.equal(loaded["BatchNorm_0.running_var"], torch.tensor(NORM["moving_variance"]))
    assert torch.equal(loaded["BatchNorm_0.weight"], torch.tensor(NORM["gamma"]))
    assert torch.equal(loaded["Dense_0.weight"], torch.tensor(big).T)
    assert loaded["Chunk.bias"].tolist() == [[0, 1, 2], [3, 4, 5]]
    (tmp_path / "f.msgpack").write_bytes(pack({**tree, "ema_params": tree["params"]}))
    load_checkpoint(tmp_path / "f.msgpack", weights="ema")


@pytest.mark.parametrize("compressed", [False, True])
def test_numpy_archives_are_read_and_objects_refused(tmp_path: Path, compressed: bool) -> None:
    save = np.savez_compressed if compressed else np.savez
    arrays = {
        "bn.running_var": np.arange(4, dtype=">f4"),
        "f": np.asfortranarray(KERNEL),
        "h": np.float16(2),
        "stem/conv/kernel": KERNEL,
        "arch": np.array("resnet18"),
    }
    save(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    expected = {
        "bn.running_var": torch.arange(4.0),
        "f": KERNEL,
        "h": torch.tensor(2, dtype=torch.float16),
        "stem.conv.kernel": KERNEL,
    }
    checkpoint = load_checkpoint(tmp_path / "a.npz")
    assert_same(checkpoint.tensors, expected)
    assert checkpoint.notes == ("left out, because they are text: 'arch'",)
    save(tmp_path / "o.npz", a=np.array([{}], dtype=object))
    with pytest.raises(CheckpointError, match="Python objects"):
        load_checkpoint(tmp_path / "o.npz")


def npy(header: bytes, version: int = 1) -> bytes:
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + bytes(8)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_arrays_are_read_as_python_2_wrote_them_and_damaged_ones_refused(
    tmp_path: Path, version: int
) -> None:
    good = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }"
    bad = (
        b"{'desc\x17}: '<f4', 'fortran_orde}: False, 'shape: (2, 3, 2, 2), }",
        good.replace(b"'descr'", rb"'\descr'"),
        good.replace(b"2L", b"True"),
        good.replace(b"2L", b"-2"),
        good.replace(b"<f4", b"<M8"),
        good.replace(b"'<f4'", b"[('a', '<f4')]"),
        b"(" * 9000,
        b"[1]",
    )
    path = tmp_path / "a.npz"
    for header in (good, *bad):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", npy(header, version))
        if header is good:
            assert_same(load_checkpoint(path).tensors, {"a": torch.zeros(2)})
        else:
            with pytest.raises(CheckpointError, match=r"a\.npz: a: "):
                load_checkpoint(path)
