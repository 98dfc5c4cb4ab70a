"""Formats of other tools: TorchScript, exported programs, DCP, ONNX; what cannot be read.

Each specimen is made by the real library where it is installed, else byte by byte.
"""

from __future__ import annotations

import tarfile
import zipfile
from typing import TYPE_CHECKING

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
from tests.checkpoint_support import assert_same

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
