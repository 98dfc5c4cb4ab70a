"""Formats of other tools: TorchScript, exported programs, DCP, ONNX, Keras, TensorFlow, Flax, npz.

Each specimen is made by the real library where it is installed, else byte by byte.
"""

from __future__ import annotations

import json
import struct
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import onnx
import onnx.helper as oh
import pytest
import safetensors.torch
import torch
from onnx import numpy_helper
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from bnconvert.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
from bnconvert.errors import CheckpointError
from bnconvert.testing import randomize_batchnorm, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4, eps=1e-3, momentum=None)
        self.last = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.bn(self.conv(x)).mean((2, 3)))
        return y


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    randomize_batchnorm(model)
    return model.eval()


def assert_same(loaded: Any, expected: dict[str, Any]) -> None:
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        tensor = torch.as_tensor(value)
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("traced", [True, False])
def test_torchscript_weights_and_eps_are_read_without_its_program(
    tmp_path: Path, traced: bool
) -> None:
    model = net()
    make = torch.jit.trace(model, torch.randn(2, 3, 4, 4)) if traced else torch.jit.script(model)  # type: ignore[no-untyped-call]
    make.save(tmp_path / "s.pt")
    checkpoint = load_checkpoint(tmp_path / "s.pt")
    assert checkpoint.format == "TorchScript"
    assert_same(checkpoint.tensors, model.state_dict())
    assert checkpoint.bn["bn"]["eps"].value == 1e-3
    assert checkpoint.bn["last"]["eps"].value == 1e-5
    if not traced:
        assert checkpoint.bn["bn"]["momentum"].value is None


@pytest.mark.parametrize("old", [False, True])
def test_exported_programs_give_weights_and_eps(tmp_path: Path, old: bool) -> None:
    model = net()
    torch.export.save(torch.export.export(model, (torch.randn(2, 3, 4, 4),)), tmp_path / "e.pt2")
    if old:  # the layout of torch before 2.8, made of the same parts
        torch.save(model.state_dict(), tmp_path / "state.pt")
        with zipfile.ZipFile(tmp_path / "e.pt2") as new:
            program = new.read("e/models/model.json")
        with zipfile.ZipFile(tmp_path / "e.pt2", "w") as archive:
            archive.writestr("serialized_exported_program.json", program)
            archive.write(tmp_path / "state.pt", "serialized_state_dict.pt")
            archive.writestr("version", "5.1")
    checkpoint = load_checkpoint(tmp_path / "e.pt2")
    assert checkpoint.format == "torch.export archive"
    assert_same(checkpoint.tensors, model.state_dict())
    assert {layer: facts["eps"].value for layer, facts in checkpoint.bn.items()} == {
        "bn": 1e-3,
        "last": 1e-5,
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints_keep_their_tree(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 3}
    save_distributed(tree, checkpoint_id=tmp_path / "d", no_dist=True)
    checkpoint = load_checkpoint(tmp_path / "d")
    assert checkpoint.format == "torch distributed checkpoint"
    assert_same(checkpoint.tensors, model.state_dict())
    convert_checkpoint(tmp_path / "d", tmp_path / "w.safetensors")
    assert_same(load_checkpoint(tmp_path / "w.safetensors").tensors, model.state_dict())


def _save_sharded(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(60.0).reshape(10, 6)
    state = {
        "rows.weight": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns.weight": distribute_tensor(whole, mesh, [Shard(1)]),
        "odd.weight": distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]),
        "half.weight": distribute_tensor(whole.bfloat16(), mesh, [Shard(0)]),
        "line.weight": distribute_tensor(whole.reshape(1, 30, 2), mesh, [Shard(1)]),
        "inner.weight": distribute_tensor(whole.reshape(2, 15, 2), mesh, [Shard(1)]),
        "empty.weight": distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)]),
        "one.weight": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)]),
        "scalar": torch.tensor(5),
        "turned.weight": whole.t(),
        "same.running_mean": torch.arange(4.0),
        "same.running_var": torch.ones(4),
    }
    save_distributed(state, checkpoint_id=folder)


def test_pieces_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, str(tmp_path / "d"))
    whole = torch.arange(60.0).reshape(10, 6)
    expected = {
        "rows.weight": whole,
        "columns.weight": whole,
        "odd.weight": torch.arange(7.0),
        "half.weight": whole.bfloat16(),
        "line.weight": whole.reshape(1, 30, 2),
        "inner.weight": whole.reshape(2, 15, 2),
        "empty.weight": torch.empty(0, 3),
        "one.weight": torch.ones(1, 3),
        "scalar": torch.tensor(5),
        "turned.weight": whole.t(),
        "same.running_mean": torch.arange(4.0),
        "same.running_var": torch.ones(4),
    }
    checkpoint = load_checkpoint(tmp_path / "d")
    assert_same(checkpoint.tensors, expected)
    assembled = {name for name, entry in checkpoint.entries.items() if entry.extent is None}
    assert assembled == {"columns.weight", "inner.weight", "turned.weight"}  # others are copied
    for verify in (False, True):
        save_checkpoint(checkpoint, tmp_path / f"{verify}.safetensors", verify=verify)
        assert_same(safetensors.torch.load_file(tmp_path / f"{verify}.safetensors"), expected)
    next(iter(sorted((tmp_path / "d").glob("__1*")))).unlink()
    with pytest.raises(CheckpointError, match=r"missing|No such file"):
        load_checkpoint(tmp_path / "d")


def onnx_model(raw: bool, constants: bool) -> onnx.ModelProto:
    torch.manual_seed(0)
    tensors, nodes = [], []
    for name, value in net().bn.state_dict().items():
        if name == "num_batches_tracked":
            continue
        array = value.numpy()
        if raw:
            proto = numpy_helper.from_array(array, f"stem.bn.{name}")
        else:
            proto = oh.make_tensor(f"stem.bn.{name}", onnx.TensorProto.FLOAT, array.shape, array)
        if constants:
            nodes.append(oh.make_node("Constant", [], [f"stem.bn.{name}"], value=proto))
        else:
            tensors.append(proto)
    half = oh.make_tensor("half", onnx.TensorProto.FLOAT16, [3], [0.5, -2.0, 65504.0])
    tensors += [half, oh.make_tensor("ids", onnx.TensorProto.INT64, [2], [-1, 5])]
    names = [f"stem.bn.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
    nodes.append(oh.make_node("BatchNormalization", ["x", *names], ["y"], epsilon=1e-3))
    graph = oh.make_graph(
        nodes,
        "g",
        [oh.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 2, 2])],
        [oh.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 4, 2, 2])],
        tensors,
    )
    return oh.make_model(graph)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("constants", [True, False])
def test_onnx_initializers_and_constants_are_read_with_eps(
    tmp_path: Path, raw: bool, constants: bool
) -> None:
    onnx.save(onnx_model(raw, constants), tmp_path / "m.onnx")
    checkpoint = load_checkpoint(tmp_path / "m.onnx")
    state = {f"stem.bn.{n}": v for n, v in net().bn.state_dict().items() if v.ndim}
    half = torch.tensor([0.5, -2.0, 65504.0], dtype=torch.float16)
    assert_same(checkpoint.tensors, {**state, "half": half, "ids": torch.tensor([-1, 5])})
    facts = checkpoint.bn["stem.bn"]
    assert (facts["eps"].value, facts["momentum"].value) == (1e-3, 0.1)
    assert facts["momentum"].source == "BatchNormalization node, 1 - 0.9"


def test_onnx_external_data_stays_inside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    onnx.save(onnx_model(True, False), folder / "m.onnx", save_as_external_data=True,
              location="m.bin", size_threshold=0)  # fmt: skip
    state = net().bn.state_dict()
    loaded = load_checkpoint(folder / "m.onnx").tensors
    assert torch.equal(loaded["stem.bn.running_var"], state["running_var"])
    (folder / "m.bin").rename(tmp_path / "m.bin")
    content = (folder / "m.onnx").read_bytes()
    (folder / "m.onnx").write_bytes(content.replace(b"m.bin", b"/m.bi"))
    with pytest.raises(CheckpointError, match="not inside it"):
        load_checkpoint(folder / "m.onnx")
    (folder / "m.bin").symlink_to(tmp_path / "m.bin")
    (folder / "m.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match="link out of its folder"):
        load_checkpoint(folder / "m.onnx")


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


def pack(value: Any) -> bytes:
    """Write MessagePack as Flax does."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(pack(k) + pack(v) for k, v in value.items())
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, int):
        return b"\xd2" + struct.pack(">i", value)
    if isinstance(value, (list, tuple)):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    array = np.asarray(value)
    inner = pack([list(array.shape), array.dtype.name, array.tobytes()])
    return b"\xc9" + struct.pack(">I", len(inner)) + b"\x01" + inner


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
    }
    save(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    expected = {
        "bn.running_var": torch.arange(4.0),
        "f": KERNEL,
        "h": torch.tensor(2, dtype=torch.float16),
        "stem.conv.kernel": KERNEL,
    }
    assert_same(load_checkpoint(tmp_path / "a.npz").tensors, expected)
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
        good.replace(b"<f4", b"<U4"),
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


def tar_of(path: Path, name: str) -> None:
    (path.parent / name).write_text("x")
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(path.parent / name, name)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x12\x01\x00\x00\x00\x00\x00\x00" + b"\0" * 40, "MXNet"),
        (b"\x0a\x03net\xa2\x06\x04\x0a\x02c1", "Caffe model"),
        (b"\x1c\0\0\0TFL3" + b"\0" * 20, "TensorFlow Lite"),
        (b"GGUF" + b"\0" * 20, "GGUF"),
        (b"<!DOCTYPE html><html>", "download went wrong"),
        (b"version https://git-lfs.github.com/spec/v1\noid x", "git lfs pull"),
        (b"\x1f\x8b\x08" + b"\0" * 20, "gzip"),
        (b"plain text, no weights at all", "no known format"),
        (b"", "is empty"),
    ],
)
def test_what_cannot_be_read_is_named_with_a_way_out(
    tmp_path: Path, content: bytes, text: str
) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.bin.*{text}"):
        load_checkpoint(tmp_path / "x.bin")


def test_old_torch_archives_and_paddle_dictionaries_are_named(tmp_path: Path) -> None:
    import pickle

    tar_of(tmp_path / "old.pth", "sys_info")
    with pytest.raises(CheckpointError, match=r"before 0\.1\.10"):
        load_checkpoint(tmp_path / "old.pth")
    paddle = {"StructuredToParameterName@@": {}, "w": np.ones(2)}
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps(paddle, protocol=2))
    with pytest.raises(CheckpointError, match="Paddle"):
        load_checkpoint(tmp_path / "m.pdparams")
    with pytest.raises(CheckpointError, match="No such file"):
        load_checkpoint(tmp_path / "nowhere.pth")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no weights"):
        load_checkpoint(tmp_path / "empty")
