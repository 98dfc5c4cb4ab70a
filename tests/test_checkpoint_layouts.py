"""Who wrote a checkpoint, which weights it holds, raw or averaged, and what its modules know."""

from __future__ import annotations

import argparse
import collections
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bnconvert.checkpoint import convert_checkpoint, load_checkpoint, match_checkpoint
from bnconvert.errors import CheckpointError
from bnconvert.testing import randomize_batchnorm


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, eps=1e-3), nn.ReLU())
    randomize_batchnorm(model, seed)
    return model


RAW, EMA = net(0).state_dict(), net(1).state_dict()


def wrapped(state: dict[str, Any], counter: str) -> dict[str, Any]:
    return {counter: torch.tensor(5), **{f"module.{name}": v for name, v in state.items()}}


LAYOUTS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "Lightning": (
        {"state_dict": RAW, "pytorch-lightning_version": "2.6", "callbacks": {}, "epoch": 1},
        True,
        False,
    ),
    "Lightning with WeightAveraging": (
        {
            "state_dict": EMA,
            "current_model_state": RAW,
            "averaging_state": {"n_averaged": torch.tensor(3)},
            "pytorch-lightning_version": "2.6",
        },
        True,
        True,
    ),
    "timm": (
        {"state_dict": RAW, "state_dict_ema": EMA, "arch": "resnet18", "epoch": 2,
         "args": argparse.Namespace(lr=0.1, names=["a"])},
        True,
        True,
    ),
    "torchvision": (
        {"model": RAW, "model_ema": wrapped(EMA, "n_averaged"), "lr_scheduler": {},
         "optimizer": {}, "args": argparse.Namespace(lr=1)},
        True,
        True,
    ),
    "mmengine": (
        {"meta": {}, "state_dict": EMA, "ema_state_dict": wrapped(RAW, "steps"),
         "message_hub": {}, "param_schedulers": []},
        True,
        True,
    ),
    "mmcv": ({"meta": {"epoch": 1}, "state_dict": RAW, "optimizer": {}}, True, False),
    "DeepSpeed": ({"module": RAW, "ds_version": "0.1", "param_shapes": {}}, True, False),
    "fvcore": ({"model": RAW, "optimizer": {}, "iteration": 3}, True, False),
    "detectron2": ({"model": RAW, "__author__": "x", "matching_heuristics": True}, True, False),
    "fastai": ({"model": RAW, "opt": {"hypers": []}}, True, False),
    "AveragedModel": (wrapped(EMA, "n_averaged"), False, True),
    "training checkpoint": ({"net": RAW, "ema": EMA, "acc": 0.9}, True, True),
    "state dict": (dict(RAW), True, False),
    "state dict under 'backbone_weights'": ({"backbone_weights": RAW, "x": 1}, True, False),
}  # fmt: skip


def assert_same(loaded: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_raw_and_averaged_weights_are_found(tmp_path: Path, name: str) -> None:
    tree, has_raw, has_ema = LAYOUTS[name]
    torch.save(tree, tmp_path / "c.pth")
    for wanted, there, state in (("raw", has_raw, RAW), ("ema", has_ema, EMA)):
        if there:
            checkpoint = load_checkpoint(tmp_path / "c.pth", weights=wanted)
            assert checkpoint.layout == name
            assert_same(checkpoint.tensors, state)
        else:
            with pytest.raises(CheckpointError, match=r"c\.pth.*(EMA|averaged)"):
                load_checkpoint(tmp_path / "c.pth", weights=wanted)
    auto = load_checkpoint(tmp_path / "c.pth")
    assert_same(auto.tensors, EMA if has_ema else RAW)
    if has_raw and has_ema:
        assert "auto chose the EMA weights" in auto.notes[0]


def test_an_average_of_the_parameters_alone_gets_the_raw_buffers(tmp_path: Path) -> None:
    parameters = {name: value for name, value in EMA.items() if "running" not in name}
    del parameters["1.num_batches_tracked"]
    torch.save({"state_dict": RAW, "state_dict_ema": parameters, "arch": "x"}, tmp_path / "c.pth")
    checkpoint = load_checkpoint(tmp_path / "c.pth")
    assert torch.equal(checkpoint.tensors["1.weight"], EMA["1.weight"])
    assert torch.equal(checkpoint.tensors["1.running_var"], RAW["1.running_var"])
    assert any("3 buffers come from state_dict" in note for note in checkpoint.notes)


def test_torch_averaged_model_is_read_with_and_without_wrappers(tmp_path: Path) -> None:
    model = net()
    averaged = AveragedModel(model, use_buffers=True)
    averaged.update_parameters(net(1))
    torch.save(averaged.state_dict(), tmp_path / "c.pth")
    checkpoint = load_checkpoint(tmp_path / "c.pth")
    assert checkpoint.layout == "AveragedModel"
    assert_same(checkpoint.tensors, averaged.module.state_dict())
    assert checkpoint.versions["1"]["version"] == 2


def test_two_networks_without_a_usual_name_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"generator": RAW, "discriminator": EMA}, tmp_path / "gan.pth")
    with pytest.raises(CheckpointError, match=r"'generator', 'discriminator'"):
        load_checkpoint(tmp_path / "gan.pth")
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match=r"no tensors by name; its keys are 'epoch'"):
        load_checkpoint(tmp_path / "none.pth")


@pytest.mark.parametrize("key", ["model", "ema", None])
def test_a_pickled_module_gives_its_state_dict_and_eps(tmp_path: Path, key: str | None) -> None:
    model = net().half()
    model.register_buffer("hidden", torch.ones(1), persistent=False)
    tree: Any = model
    if key == "model":
        tree = {"model": model, "ema": None, "epoch": 1, "train_args": {"a": 1}}
    if key == "ema":
        tree = {"model": None, "ema": model, "updates": 3}
    torch.save(tree, tmp_path / "best.pt")
    checkpoint = load_checkpoint(tmp_path / "best.pt")
    assert_same(checkpoint.tensors, model.state_dict())
    assert checkpoint.bn["1"]["eps"].value == 1e-3
    assert checkpoint.bn["1"]["momentum"].value == 0.1
    target = net(3).half()
    target.load_state_dict(match_checkpoint(checkpoint, target))
    assert_same(target.state_dict(), model.state_dict())


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])
        self.shared = self.inner[0]
        self.extra = {"free": [1, 2]}


class Settings(dict[str, Any]):
    """Hyper-parameters as Lightning keeps them: a class of another package."""


def test_shared_modules_and_foreign_classes_in_a_module_are_inert(tmp_path: Path) -> None:
    model = Custom()
    randomize_batchnorm(model)
    torch.save(model, tmp_path / "m.pt")
    checkpoint = load_checkpoint(tmp_path / "m.pt")
    assert_same(checkpoint.tensors, model.state_dict())
    convert_checkpoint(tmp_path / "m.pt", tmp_path / "w.pth")
    again = torch.load(tmp_path / "w.pth", weights_only=True)
    assert again["shared.weight"].data_ptr() == again["inner.0.weight"].data_ptr()


def test_a_class_outside_a_module_needs_its_name_allowed(tmp_path: Path) -> None:
    name = f"{Settings.__module__}.Settings"
    torch.save(
        {"state_dict": RAW, "callbacks": {}, "hyper_parameters": Settings(lr=1)},
        tmp_path / "l.ckpt",
    )
    with pytest.raises(CheckpointError, match=f"--allow-global {name}"):
        load_checkpoint(tmp_path / "l.ckpt")
    with pytest.raises(CheckpointError, match=f"--allow-global {name}"):
        load_checkpoint(tmp_path / "l.ckpt", allow_globals=[name + "2"])
    assert_same(load_checkpoint(tmp_path / "l.ckpt", allow_globals=[name]).tensors, RAW)


def test_ordinary_values_of_training_files_need_no_permission(tmp_path: Path) -> None:
    import datetime

    import numpy as np

    extra = {
        "path": Path("a/b"),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "best": np.float64(0.5),
        "curve": np.arange(4.0),
        "counts": collections.Counter("aab"),
        "default": collections.defaultdict(list, {"a": [1]}),
        "queue": collections.deque([1], maxlen=3),
        "set": {1, "a"},
        "complex": 1j,
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
    }
    optimizer = torch.optim.AdamW(net().parameters())
    torch.save(
        {"state_dict": RAW, "callbacks": extra, "optimizer_states": [optimizer.state_dict()]},
        tmp_path / "l.ckpt",
    )
    assert_same(load_checkpoint(tmp_path / "l.ckpt").tensors, RAW)


def test_quantized_and_sparse_weights_are_named_in_the_refusal(tmp_path: Path) -> None:
    torch.save({**RAW, "s": torch.eye(3).to_sparse()}, tmp_path / "s.pth")
    with pytest.raises(CheckpointError, match="s: is a sparse tensor"):
        load_checkpoint(tmp_path / "s.pth")


def test_deepspeed_folders_follow_latest_and_stage_three_is_refused(tmp_path: Path) -> None:
    step = tmp_path / "global_step3"
    step.mkdir()
    (tmp_path / "latest").write_text("global_step3")
    torch.save({"module": RAW, "ds_version": "1", "param_shapes": {}},
               step / "mp_rank_00_model_states.pt")  # fmt: skip
    assert_same(load_checkpoint(tmp_path).tensors, RAW)
    placeholder = {name: torch.empty(0) for name in RAW}
    torch.save({"module": placeholder, "ds_version": "1", "param_shapes": [{"a": 1}],
                "ds_config": {"zero_optimization": {"stage": 3}}},
               step / "zero_pp_rank_0_mp_rank_00_model_states.pt")  # fmt: skip
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        load_checkpoint(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (step / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        load_checkpoint(step)


def test_folders_are_read_by_the_names_that_tools_give(tmp_path: Path) -> None:
    torch.save({"state_dict": RAW, "arch": "x"}, tmp_path / "checkpoint-3.pth.tar")
    torch.save({"state_dict": EMA, "arch": "x"}, tmp_path / "last.pth.tar")
    (tmp_path / "args.yaml").write_text("a: 1")
    checkpoint = load_checkpoint(tmp_path)
    assert_same(checkpoint.tensors, EMA)
    assert "last.pth.tar was taken" in checkpoint.notes[0]
    torch.save({"state_dict": RAW, "arch": "x"}, tmp_path / "model_best.pth.tar")
    assert_same(load_checkpoint(tmp_path).tensors, RAW)
    several = tmp_path / "several"
    several.mkdir()
    for name in "ab":
        torch.save(RAW, several / f"{name}.pth")
    with pytest.raises(CheckpointError, match=r"several files of weights.*a\.pth"):
        load_checkpoint(several)


def test_a_hugging_face_cache_is_followed_through_its_links(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    for folder in ("blobs", "refs", "snapshots/abc"):
        (cache / folder).mkdir(parents=True)
    torch.save(RAW, cache / "blobs" / "123")
    (cache / "snapshots/abc/pytorch_model.bin").symlink_to("../../blobs/123")
    (cache / "refs/main").write_text("abc")
    assert_same(load_checkpoint(cache).tensors, RAW)
    assert_same(load_checkpoint(cache / "snapshots/abc").tensors, RAW)
    torch.save(EMA, tmp_path / "outside.bin")
    (cache / "snapshots/abc/pytorch_model.bin").unlink()
    (cache / "snapshots/abc/pytorch_model.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(CheckpointError, match="link out of its folder"):
        load_checkpoint(cache)


def test_shards_without_their_index_are_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    torch.save(RAW, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match="no index"):
        load_checkpoint(tmp_path)
    part = load_checkpoint(tmp_path / "pytorch_model-00001-of-00002.bin")
    assert "by its name (00001-of-00002) this is a part" in part.notes[0]


@pytest.mark.parametrize("tree", [{}, {0: RAW["0.weight"]}], ids=["nothing", "numbers"])
def test_a_file_without_tensors_by_name_is_refused(tmp_path: Path, tree: dict[Any, Any]) -> None:
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no tensors by name; "):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_state_dicts_saved_by_plain_pickle_are_read(tmp_path: Path, protocol: int) -> None:
    with (tmp_path / "w.pkl").open("wb") as stream:
        pickle.dump(dict(RAW), stream, protocol=protocol)
    assert_same(load_checkpoint(tmp_path / "w.pkl").tensors, RAW)


def test_numpy_pickles_of_detectron_are_read(tmp_path: Path) -> None:
    import numpy as np

    model = {name: value.numpy() for name, value in RAW.items()}
    big = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    model["fortran"] = np.asfortranarray(big)
    model["big"] = big
    model["big_endian"] = big[:2].astype(">f4")
    with (tmp_path / "d.pkl").open("wb") as stream:
        pickle.dump({"model": model, "__author__": "x"}, stream)
    expected = {**RAW, "fortran": torch.tensor(big), "big": torch.tensor(big),
                "big_endian": torch.tensor(big[:2])}  # fmt: skip
    assert_same(load_checkpoint(tmp_path / "d.pkl").tensors, expected)


def test_caffe2_norms_get_statistics_that_leave_scale_and_bias_alone(tmp_path: Path) -> None:
    import numpy as np

    blobs = {
        "conv1_w": np.ones((4, 3, 7, 7), np.float32),
        "res_conv1_bn_s": np.arange(4, dtype=np.float32) - 1,
        "res_conv1_bn_b": np.ones(4, np.float32),
        "res2_0_branch2a_w": np.ones((4, 4, 1, 1), np.float32),
        "res2_0_branch2a_bn_s": np.full(4, 2, np.float32),
        "res2_0_branch2a_bn_b": np.ones(4, np.float32),
        "res2_0_branch2a_w_momentum": np.ones(4, np.float32),
    }
    with (tmp_path / "R-50.pkl").open("wb") as stream:
        pickle.dump({"blobs": blobs}, stream, protocol=2)
    report = convert_checkpoint(tmp_path / "R-50.pkl", tmp_path / "w.safetensors")
    loaded = load_checkpoint(tmp_path / "w.safetensors")
    assert torch.equal(loaded.tensors["res2.0.conv1.norm.weight"], torch.full((4,), 2.0))
    norm = nn.BatchNorm2d(4, eps=loaded.bn["stem.conv1.norm"]["eps"].value).eval()
    norm.load_state_dict(
        {k.rpartition(".")[2]: v for k, v in loaded.tensors.items() if "stem.conv1.norm" in k},
        strict=False,
    )
    x = torch.randn(2, 4, 3, 3)
    scale = torch.arange(4.0).reshape(1, 4, 1, 1) - 1
    torch.testing.assert_close(norm(x), x * scale + 1)
    assert not any("num_batches_tracked" in name for name in loaded.tensors)
    assert all("untouched" not in layer.reason for layer in report.left)


def test_timm_renaming_is_used_for_its_own_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = timm.create_model("test_convnext").state_dict()
    original = {}
    for name, value in reversed(state.items()):  # the names of the authors' own files
        old = re.sub(r"stages\.(\d+)\.blocks\.(\d+)", r"stages.\1.\2", name)
        old = re.sub(r"stages\.(\d+)\.downsample\.(\d+)", r"downsample_layers.\1.\2", old)
        for new_part, old_part in (
            ("stem.", "downsample_layers.0."),
            ("conv_dw", "dwconv"),
            ("mlp.fc", "pwconv"),
            ("head.fc.", "head."),
            ("head.norm", "norm"),
        ):
            old = old.replace(new_part, old_part)
        original[old] = value
    assert set(original).isdisjoint(name for name in state if "stages" in name)
    torch.save({"model": original}, tmp_path / "c.pth")
    target = timm.create_model("test_convnext")
    target.load_state_dict(match_checkpoint(load_checkpoint(tmp_path / "c.pth"), target))
    assert_same(target.state_dict(), state)


class HistoryBuffer:
    """Stands for mmengine's class of this name, which its files hold with its methods."""

    def mean(self) -> None:
        """Pickled by protocol 2 as getattr(HistoryBuffer, "mean")."""


@pytest.mark.parametrize("protocol", [2, 4])
def test_message_hubs_of_mmengine_are_read_and_other_getattrs_refused(
    tmp_path: Path, protocol: int
) -> None:
    buffer = HistoryBuffer()
    buffer.__dict__.update(_methods={"mean": HistoryBuffer.mean}, _count=3)
    hub = {"log_scalars": {"loss": buffer}}
    tree = {"meta": {}, "state_dict": RAW, "message_hub": hub}
    own = f"c{HistoryBuffer.__module__}\nHistoryBuffer".encode()
    genuine = b"cmmengine.logging.history_buffer\nHistoryBuffer"
    torch.save(tree, tmp_path / "own.pth", pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match="HistoryBuffer"):
        load_checkpoint(tmp_path / "own.pth")
    if protocol == 2:
        with (
            zipfile.ZipFile(tmp_path / "own.pth") as old,
            zipfile.ZipFile(tmp_path / "mm.pth", "w") as new,
        ):
            for name in old.namelist():
                new.writestr(name, old.read(name).replace(own, genuine))
        assert_same(load_checkpoint(tmp_path / "mm.pth").tensors, RAW)
