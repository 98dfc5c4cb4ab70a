"""Conversion of checkpoints: round trips, what BatchNorm keeps, casts and refusals."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bnconvert.checkpoint import (
    Fact,
    convert_checkpoint,
    load_checkpoint,
    match_checkpoint,
    save_checkpoint,
)
from bnconvert.errors import CheckpointError
from bnconvert.report import Outcome
from bnconvert.testing import randomize_batchnorm
from tests.checkpoint_support import KINDS, assert_bits, mixed_state, net


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_round_trips_are_exact_in_bits_names_and_order(
    tmp_path: Path, first: str, second: str
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    state = mixed_state()
    save_checkpoint(state, tmp_path / "1" / KINDS[first])
    convert_checkpoint(tmp_path / "1" / KINDS[first], tmp_path / "2" / KINDS[second])
    checkpoint = load_checkpoint(tmp_path / "2" / KINDS[second])
    assert_bits(checkpoint.tensors, state)
    assert checkpoint.entries["first"].shares == checkpoint.entries["same"].shares or (
        checkpoint.entries["first"] is checkpoint.entries["same"]
    )


def test_written_files_are_read_by_their_own_libraries(tmp_path: Path) -> None:
    state = {name: value for name, value in mixed_state().items() if name != "same"}
    save_checkpoint(state, tmp_path / "w.pth")
    assert_bits(torch.load(tmp_path / "w.pth", weights_only=True), state)
    assert_bits(torch.load(tmp_path / "w.pth", mmap=True, weights_only=True), state)
    save_checkpoint(state, tmp_path / "w.safetensors")
    assert_bits(safetensors.torch.load_file(tmp_path / "w.safetensors"), state)


def test_shared_tensors_are_written_once_and_come_back_shared(tmp_path: Path) -> None:
    weight = torch.randn(1000, 100)
    state = {"a": weight, "b": weight, "c": weight.clone()}
    for name in ("w.safetensors", "w.pth"):
        save_checkpoint(state, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 2.1 * 400_000
        assert_bits(load_checkpoint(tmp_path / name).tensors, state)
    loaded = torch.load(tmp_path / "w.pth", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() != loaded["c"].data_ptr()


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((250,), float(i)) for i in range(10)}
    save_checkpoint(state, tmp_path / "w", max_shard_size=3000)
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    assert index["metadata"]["total_size"] == 10_000
    assert_bits(load_checkpoint(tmp_path / "w").tensors, state)
    with pytest.raises(CheckpointError, match="exists"):
        save_checkpoint(state, tmp_path / "w", max_shard_size=3000)


def test_versions_survive_every_format(tmp_path: Path) -> None:
    state = net().state_dict()
    for name in KINDS.values():
        save_checkpoint(state, tmp_path / name)
        again = load_checkpoint(tmp_path / name)
        assert again.versions["1"] == {"version": 2}
    assert torch.load(tmp_path / "w.pth", weights_only=True)._metadata["1"] == {"version": 2}


def test_provenance_names_source_hash_layout_and_changes(tmp_path: Path) -> None:
    import hashlib

    state = net().state_dict()
    del state["1.num_batches_tracked"]
    torch.save({"state_dict": state, "arch": "none", "epoch": 3}, tmp_path / "t.pth")
    convert_checkpoint(tmp_path / "t.pth", tmp_path / "w.safetensors")
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as file:
        told = json.loads(file.metadata()["bnconvert.provenance"])
    assert told["sha256"] == hashlib.sha256((tmp_path / "t.pth").read_bytes()).hexdigest()
    assert told["layout"] == "timm"
    assert "num_batches_tracked added" in told["changes"]["1"]


def test_a_missing_counter_is_added_as_int64_and_another_dtype_becomes_int64(
    tmp_path: Path,
) -> None:
    state = net().state_dict()
    del state["1.num_batches_tracked"]
    state["3.num_batches_tracked"] = torch.tensor([7.0])
    torch.save(state, tmp_path / "w.pth")
    report = convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    loaded = load_checkpoint(tmp_path / "w.safetensors").tensors
    assert loaded["1.num_batches_tracked"].dtype is torch.int64
    assert loaded["3.num_batches_tracked"].item() == 7
    assert loaded["3.num_batches_tracked"].dtype is torch.int64
    rows = {layer.name: layer for layer in report.layers}
    assert rows["1"].outcome is Outcome.REWRITTEN
    assert "momentum=None" in rows["1"].now
    net(1).load_state_dict(dict(loaded))
    state["3.num_batches_tracked"] = torch.tensor(7.5)
    torch.save(state, tmp_path / "bad.pth")
    with pytest.raises(CheckpointError, match=r"3\.num_batches_tracked.*7\.5"):
        convert_checkpoint(tmp_path / "bad.pth", tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("inf"), "infinite"), (float("nan"), "NaN"), (-1e-3, "negative"), (1e5, "above 65504")],
)
def test_variances_that_will_fail_are_found(tmp_path: Path, value: float, text: str) -> None:
    state = net().state_dict()
    state["1.running_var"][2] = value
    torch.save(state, tmp_path / "w.pth")
    report = convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert [(layer.name, text in layer.reason) for layer in report.left] == [("1", True)]
    assert_bits(load_checkpoint(tmp_path / "w.safetensors").tensors, state)


def test_untouched_statistics_are_found_and_column_shapes_squeezed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    state = model.state_dict()
    state["1.weight"] = state["1.weight"].reshape(1, 3)
    torch.save(state, tmp_path / "w.pth")
    report = convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert "untouched" in report.left[0].reason
    assert load_checkpoint(tmp_path / "w.safetensors").entries["1.weight"].shape == (3,)


def test_a_missing_gamma_or_beta_is_completed(tmp_path: Path) -> None:
    state = net().state_dict()
    del state["1.weight"], state["3.bias"]
    torch.save(state, tmp_path / "w.pth")
    convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    loaded = load_checkpoint(tmp_path / "w.safetensors").tensors
    assert loaded["1.weight"].tolist() == [1] * 5
    assert loaded["3.bias"].tolist() == [0] * 5


def test_inplace_abn_weights_become_absolute_only_on_request(tmp_path: Path) -> None:
    state = net().state_dict()
    torch.save(state, tmp_path / "w.pth")
    convert_checkpoint(tmp_path / "w.pth", tmp_path / "a.safetensors")
    convert_checkpoint(tmp_path / "w.pth", tmp_path / "b.safetensors", abn=True)
    assert torch.equal(
        load_checkpoint(tmp_path / "a.safetensors").tensors["1.weight"], state["1.weight"]
    )
    torch.testing.assert_close(
        load_checkpoint(tmp_path / "b.safetensors").tensors["1.weight"],
        state["1.weight"].abs() + 1e-5,
    )


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("cast_norm", [False, True])
def test_casting_keeps_batchnorm_and_integers(tmp_path: Path, name: str, cast_norm: bool) -> None:
    state = net().double().state_dict()
    state["ids"] = torch.arange(3)
    torch.save(state, tmp_path / "w.pth")
    convert_checkpoint(tmp_path / "w.pth", tmp_path / "o.pth", dtype=name, cast_norm=cast_norm)
    loaded = load_checkpoint(tmp_path / "o.pth").tensors
    target = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]
    for key, value in state.items():
        norm = key.startswith(("1.", "3."))
        floating = value.is_floating_point()
        expected = value.to(torch.float32 if norm and not cast_norm else target)
        assert_bits({key: loaded[key]}, {key: expected if floating else value})


def test_values_beyond_the_target_dtype_are_refused_by_name(tmp_path: Path) -> None:
    state = net().state_dict()
    state["1.running_var"][0] = 70000.0
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"1\.running_var.*70000.*float16"):
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "o.pth", dtype="fp16", cast_norm=True)
    convert_checkpoint(tmp_path / "w.pth", tmp_path / "o.pth", dtype="fp16")
    state["c"] = torch.zeros(2, dtype=torch.complex64)
    torch.save(state, tmp_path / "c.pth")
    with pytest.raises(CheckpointError, match=r"c: is complex"):
        convert_checkpoint(tmp_path / "c.pth", tmp_path / "p.pth", dtype="fp16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pth", "o.pth", "w.pth"]


def eps_file(path: Path) -> None:
    model = net()
    model.get_submodule("1").eps = 1e-3  # type: ignore[assignment]
    torch.save(model, path)


def test_an_eps_that_differs_from_the_model_is_refused_unless_told(tmp_path: Path) -> None:
    eps_file(tmp_path / "m.pt")
    checkpoint = load_checkpoint(tmp_path / "m.pt")
    assert checkpoint.bn["1"]["eps"].value == 1e-3
    assert checkpoint.bn["1"]["eps"].source == "pickled module"
    with pytest.raises(CheckpointError, match=r"1 has eps 0\.001 in the file and 1e-05"):
        match_checkpoint(checkpoint, net())
    for choice, expected in (("from-file", 1e-3), ("from-model", 1e-5)):
        target = tmp_path / f"{choice}.safetensors"
        with pytest.raises(CheckpointError, match="choose 'from-file'"):
            convert_checkpoint(tmp_path / "m.pt", target, eps="file")
        with pytest.raises(CheckpointError, match="--eps from-file"):
            convert_checkpoint(tmp_path / "m.pt", target, model=net())
        report = convert_checkpoint(tmp_path / "m.pt", target, model=net(), eps=choice)
        assert load_checkpoint(target).bn["1"]["eps"].value == expected
        assert any(choice in layer.now for layer in report.layers)


def test_a_model_folder_is_loaded_by_timm(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=7)
    randomize_batchnorm(model)
    torch.save({"state_dict": model.state_dict(), "arch": "test_resnet"}, tmp_path / "c.pth.tar")
    target = timm.create_model("test_resnet", num_classes=7)
    convert_checkpoint(tmp_path / "c.pth.tar", tmp_path / "folder", to="folder", model=target)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert_bits(loaded.state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match="architecture"):
        save_checkpoint(model.state_dict(), tmp_path / "other", to="folder")


def test_the_suffix_decides_the_format_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    state = net().state_dict()
    for name, kind in (("a.pt", "torch zip"), ("b.safetensors", "safetensors")):
        save_checkpoint(state, tmp_path / name)
        assert load_checkpoint(tmp_path / name).format == kind
    for name, size in (("a.onnx", None), ("a.safetensors", 10)):
        with pytest.raises(CheckpointError, match="--to"):
            save_checkpoint(state, tmp_path / name, max_shard_size=size)


def test_an_abn_file_is_turned_into_batchnorm_once(tmp_path: Path) -> None:
    save_checkpoint(net().state_dict(), tmp_path / "w.safetensors")
    checkpoint = load_checkpoint(tmp_path / "w.safetensors")
    checkpoint.bn["1"] = {
        "class": Fact("inplace_abn.InPlaceABN", "test"),
        "eps": Fact(1e-3, "test"),
    }
    save_checkpoint(checkpoint, tmp_path / "abn.safetensors")
    report = convert_checkpoint(tmp_path / "abn.safetensors", tmp_path / "left.safetensors")
    assert "--abn" in report.left[0].reason
    convert_checkpoint(tmp_path / "abn.safetensors", tmp_path / "once.safetensors", abn=True)
    report = convert_checkpoint(tmp_path / "once.safetensors", tmp_path / "twice.safetensors")
    assert not report.left
    for name in ("once", "twice"):
        torch.testing.assert_close(
            load_checkpoint(tmp_path / f"{name}.safetensors").tensors["1.weight"],
            net().state_dict()["1.weight"].abs() + 1e-3,
        )


def test_frozen_layers_get_no_counter(tmp_path: Path) -> None:
    state = net().state_dict()
    del state["1.num_batches_tracked"]
    state._metadata["1"]["version"] = 3  # type: ignore[attr-defined]  # as detectron2 has it
    torch.save(state, tmp_path / "w.pth")
    report = convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert "1.num_batches_tracked" not in load_checkpoint(tmp_path / "w.safetensors").tensors
    row = next(layer for layer in report.layers if layer.name == "1")
    assert row.outcome is Outcome.CONVERTED
    assert "frozen" in row.now


NUMBERS = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8,
     torch.bool, torch.complex64]
)  # fmt: skip


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5, unique=True))
    state = {}
    for name in names:
        shape: list[int] = draw(st.lists(st.integers(0, 4), max_size=3))
        tensor = torch.randint(-9, 9, shape).to(draw(NUMBERS))
        flip: Any = st.booleans()
        if shape and draw(flip):
            tensor = tensor.transpose(0, -1)
        state[f"x.{name}"] = tensor
    return state


@settings(
    max_examples=25, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(state=states())
def test_any_state_dict_survives_every_format(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        source: Any = state
        for kind in ("w.safetensors", "w.pth", "w"):
            save_checkpoint(source, Path(folder) / kind)
            source = load_checkpoint(Path(folder) / kind, prefix="")
            assert_bits(source.tensors, state)
