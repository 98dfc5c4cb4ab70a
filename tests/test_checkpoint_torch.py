"""torch's own files: zip, legacy, sharded; what loading returns, against torch itself."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn

from bnconvert.checkpoint import load_checkpoint, match_checkpoint
from bnconvert.errors import CheckpointError
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from pathlib import Path


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Linear(5, 2))
    randomize_batchnorm(model, seed)
    return model


DTYPES = {
    str(dtype): torch.arange(6).to(dtype).reshape(2, 3)
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip

SHAPES = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "transposed": torch.randn(3, 5).T,
    "sliced": torch.randn(10)[2:9:3],
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 3).expand(4, 3),
}


def assert_same(loaded: Any, expected: dict[str, torch.Tensor]) -> None:
    assert list(loaded) == list(expected)
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("tensors", [DTYPES, SHAPES], ids=["dtypes", "shapes"])
def test_loading_returns_what_torch_saved(
    tmp_path: Path, zipped: bool, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "weights.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    checkpoint = load_checkpoint(path)
    assert checkpoint.format == ("torch zip" if zipped else "torch legacy")
    assert_same(checkpoint.tensors, tensors)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int, zipped: bool) -> None:
    path = tmp_path / "w.pt"
    torch.save(
        net().state_dict(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped
    )
    checkpoint = load_checkpoint(path)
    assert checkpoint.format == ("torch zip" if zipped else "torch legacy")
    assert_same(checkpoint.tensors, net().state_dict())


def test_big_endian_files_are_turned_around(tmp_path: Path) -> None:
    import zipfile

    torch.save({"a": torch.arange(4, dtype=torch.int32)}, tmp_path / "little.pt")
    with (
        zipfile.ZipFile(tmp_path / "little.pt") as old,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as new,
    ):
        for member in old.namelist():
            data = old.read(member)
            if member.endswith("byteorder"):
                data = b"big"
            if member.endswith("data/0"):
                data = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
            new.writestr(member, data)
    assert load_checkpoint(tmp_path / "big.pt").tensors["a"].tolist() == [0, 1, 2, 3]


def test_reading_one_tensor_reads_no_other(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 22), "b": torch.ones(2)}, tmp_path / "w.pt")
    checkpoint = load_checkpoint(tmp_path / "w.pt")
    with (tmp_path / "w.pt").open("r+b") as stream:
        stream.seek(checkpoint.entries["a"].extent.offset)  # type: ignore[union-attr]
        stream.write(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.tensors["b"]
    again = load_checkpoint(tmp_path / "w.pt")
    assert again.tensors["b"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="checksum"):
        again.tensors["a"]


def test_safetensors_and_its_shards_are_read(tmp_path: Path) -> None:
    state = net().state_dict()
    first = {k: v for k, v in state.items() if k.startswith("0")}
    second = {k: v for k, v in state.items() if not k.startswith("0")}
    safetensors.torch.save_file(state, tmp_path / "one.safetensors")
    assert_same(
        dict(sorted(load_checkpoint(tmp_path / "one.safetensors").tensors.items())),
        dict(sorted(state.items())),
    )
    folder = tmp_path / "sharded"
    folder.mkdir()
    safetensors.torch.save_file(first, folder / "a.safetensors")
    torch.save(second, folder / "b.bin")
    places = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.bin")}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_same(load_checkpoint(index).tensors, state)
    index.write_text(json.dumps({"weight_map": {**places, "0.weight": "b.bin"}}))
    with pytest.raises(CheckpointError, match="does not hold it"):
        load_checkpoint(index)
    index.write_text(json.dumps({"weight_map": {**places, "0.weight": "../one.safetensors"}}))
    with pytest.raises(CheckpointError, match="not inside it"):
        load_checkpoint(index)


def test_wrapper_names_are_removed_anywhere_unless_they_collide(tmp_path: Path) -> None:
    names = ["module._orig_mod.a.weight", "b._fsdp_wrapped_module.module.weight", "n.module"]
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "w.pt")
    assert list(load_checkpoint(tmp_path / "w.pt").tensors) == ["a.weight", "b.weight", "n.module"]
    assert list(load_checkpoint(tmp_path / "w.pt", prefix="").tensors) == names
    plain = load_checkpoint(tmp_path / "w.pt", prefix="module._orig_mod.").tensors
    assert list(plain) == ["a.weight", *names[1:]]
    torch.save({"module.a": torch.ones(1), "a": torch.ones(1)}, tmp_path / "two.pt")
    collide = load_checkpoint(tmp_path / "two.pt")
    assert list(collide.tensors) == ["module.a", "a"]
    assert "two tensors have one name" in collide.notes[0]


@pytest.mark.parametrize("wrap", ["{}", "model.{}", "backbone.{}", "module.model.{}"])
def test_matching_finds_the_prefix_that_fits_the_model(tmp_path: Path, wrap: str) -> None:
    state = net().state_dict()
    torch.save({wrap.format(name): value for name, value in state.items()}, tmp_path / "w.pt")
    target = net(1)
    target.load_state_dict(match_checkpoint(load_checkpoint(tmp_path / "w.pt"), target))
    assert_same(target.state_dict(), state)


def test_matching_adds_a_prefix_that_only_the_model_has(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "w.pt")
    target = nn.ModuleDict({"backbone": net(1)})
    target.load_state_dict(match_checkpoint(load_checkpoint(tmp_path / "w.pt"), target))
    assert_same(target["backbone"].state_dict(), net().state_dict())


def test_another_architecture_is_one_line_with_counts_and_names(tmp_path: Path) -> None:
    state = net().state_dict()
    del state["1.bias"]
    state["head.weight"] = torch.ones(1)
    state["3.weight"] = torch.ones(9, 5)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError) as caught:
        match_checkpoint(load_checkpoint(tmp_path / "w.pt"), net())
    text = str(caught.value)
    assert "\n" not in text
    assert "1 tensors of the model are missing ('1.bias')" in text
    assert "1 are not in the model ('head.weight')" in text
    assert "3.weight: [9, 5] for [2, 5]" in text


def test_a_pickle_that_calls_something_runs_nothing_and_lists_its_names(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.mkdir, (str(marker),)

    for zipped in (True, False):
        torch.save(
            {"state_dict": net().state_dict(), "callbacks": {"x": Evil()}},
            tmp_path / "evil.pt",
            _use_new_zipfile_serialization=zipped,
        )
        with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
            load_checkpoint(tmp_path / "evil.pt")
        with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
            load_checkpoint(tmp_path / "evil.pt", allow_globals=["posix.mkdir"])
    assert not marker.exists()
    assert pickle.dumps(Evil())
