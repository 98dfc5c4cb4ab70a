"""MODEL specifications, model folders and what they bring back."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

from bnconvert import (
    BnconvertError,
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    fold_batchnorm,
    freeze_batchnorm,
    inspect_batchnorm,
    load_checkpoint,
    load_model,
    save_model,
)
from bnconvert.errors import CheckpointError
from bnconvert.layers.frozen import frozen_state
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Small(nn.Sequential):
    """A model that timm does not know, with one tensor under two names."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3))
        self[2].weight = self[0].weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self[1](self[0](x)) + self[2](x)
        return result


def failing() -> nn.Module:
    raise RuntimeError("no luck\nsecond line")


def returns_a_list() -> list[int]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved timm model with random statistics, other eps, synchronised and frozen layers."""
    model = timm.create_model("resnet18", num_classes=5)
    randomize_batchnorm(model)
    model.bn1.eps, model.bn1.momentum = 1e-3, None
    convert_sync_batchnorm(model, exclude="layer4.*")
    freeze_batchnorm(model, include="layer1.0.*")
    freeze_batchnorm(model, include="layer2.0.bn1", stats=False)
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_brings_back_weights_and_the_state_of_every_norm_layer(folder: Path) -> None:
    model: Any = load_model(folder)
    assert type(model.bn1) is SyncBatchNorm2d
    assert (model.bn1.eps, model.bn1.momentum) == (1e-3, None)
    assert type(model.layer1[0].bn1).__name__ == "FrozenBatchNorm2d"
    assert not model.layer1[0].bn1.weight.requires_grad
    assert type(model.layer2[0].bn1) is SyncBatchNorm2d
    state = frozen_state(model.layer2[0].bn1)
    assert state is not None
    assert not state.stats
    assert type(model.layer4[0].bn1) is nn.BatchNorm2d
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_folder_keeps_its_norm_layers_under_another_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    torch.save(load_model(folder).state_dict(), tmp_path / "weights.pt")
    model: Any = load_model(folder, tmp_path / "weights.pt")
    assert type(model.bn1) is SyncBatchNorm2d
    assert model.bn1.eps == 1e-3
    assert type(model.layer1[0].bn1).__name__ == "FrozenBatchNorm2d"
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.eval()(x), load_model(folder).eval()(x))


def _with_sparse_buffer() -> nn.Module:
    model = nn.BatchNorm2d(4)
    model.register_buffer("mask", torch.eye(3).to_sparse())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.LazyBatchNorm2d()), "0.weight: is not initialized"),
        (nn.BatchNorm2d(4, device="meta"), "weight: is on the meta device"),
        (_with_sparse_buffer(), "mask: has the layout torch.sparse_coo"),
        ({"a": 1}, "model: is a dict"),
    ],
)
def test_what_a_folder_cannot_hold_is_one_line(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(BnconvertError, match=message):
        save_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_timm_itself_loads_the_folder(folder: Path) -> None:
    ours = load_model(folder).eval()
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    theirs.bn1.eps = 1e-3  # what a state dict does not hold
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(x), theirs(x))
    again = load_model(f"local-dir:{folder}").eval()
    assert torch.equal(again(x), theirs(x))


def test_dtypes_of_a_folder_are_those_that_were_saved(tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=5).half()
    model.bn1.float()
    save_model(model, tmp_path / "half")
    loaded: Any = load_model(tmp_path / "half")
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_model_of_other_origin_loads_with_its_callable(tmp_path: Path) -> None:
    model = convert_sync_batchnorm(Small())
    randomize_batchnorm(model)
    save_model(model, tmp_path / "small")
    spec = f"{__name__}:Small"
    loaded = load_model(spec, tmp_path / "small")
    assert type(loaded[1]) is SyncBatchNorm2d  # type: ignore[index]
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    with pytest.raises(BnconvertError, match=r"names no timm architecture; give package\.module"):
        load_model(tmp_path / "small")


def test_different_values_for_a_shared_tensor_are_refused(tmp_path: Path) -> None:
    tensors = Small().state_dict()
    save_file({n: t.clone() for n, t in tensors.items()}, tmp_path / "same.safetensors")
    load_model(f"{__name__}:Small", tmp_path / "same.safetensors")
    tensors["2.weight"] = -tensors["2.weight"]
    save_file(tensors, tmp_path / "other.safetensors")
    message = r"0\.weight and 2\.weight are one tensor there and have different values here"
    with pytest.raises(CheckpointError, match=message):
        load_model(f"{__name__}:Small", tmp_path / "other.safetensors")


def replaced(model: Any, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


def _prune(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]


class Residual(timm.models.resnet.BasicBlock):  # type: ignore[misc]
    """A block as a user's recipe would put in place of timm's."""


CHANGES: dict[str, Callable[[Any], object]] = {
    "fc.weight has shape [7, 96] and not [1000, 96]": lambda m: replaced(m, "fc", nn.Linear(96, 7)),
    "it holds fc.0.weight": lambda m: replaced(m, "fc", nn.Sequential(nn.Linear(96, 7))),
    "it does not hold bn1.running_mean": lambda m: replaced(m, "bn1", nn.GroupNorm(2, 32)),
    "act1 is Hardswish() and not ReLU()": lambda m: replaced(m, "act1", nn.Hardswish()),
    "maxpool is Identity() and not MaxPool2d(": lambda m: replaced(m, "maxpool", nn.Identity()),
    "layer1.0.conv1 is Conv2d(": lambda m: setattr(m.layer1[0].conv1, "dilation", (2, 2)),
    "it holds conv1.0.weight_orig": lambda m: _prune(m.conv1[0]),
    "it holds layer4.1, a ReLU": lambda m: m.layer4.append(nn.ReLU()),
    "it does not hold layer1.0.act1, a ReLU": lambda m: delattr(m.layer1[0], "act1"),
    "maxpool is MaxPool2d(kernel_size=5": lambda m: setattr(m.maxpool, "kernel_size", 5),
    "layer1.0 is Residual and not BasicBlock": lambda m: setattr(
        m.layer1[0], "__class__", Residual
    ),
    "layer2.0 has a forward of its own": lambda m: setattr(m.layer2[0], "forward", m.fc.forward),
    "layer1.0 has stride = 2 and not 1": lambda m: setattr(m.layer1[0], "stride", 2),
}


@pytest.mark.parametrize("difference", CHANGES)
def test_what_timm_would_build_differently_is_said_and_not_loaded_as_it(
    tmp_path: Path, difference: str
) -> None:
    model = timm.create_model("test_resnet")
    CHANGES[difference](model)
    with pytest.warns(UserWarning, match=f"save_model: {re.escape(difference)}.*, unlike"):
        save_model(model, tmp_path / "model")
    with pytest.raises(BnconvertError, match="names no timm architecture"):
        load_model(tmp_path / "model")
    kept = load_checkpoint(tmp_path / "model").tensors
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


def test_what_changes_no_output_is_no_difference(tmp_path: Path) -> None:
    model: Any = timm.create_model("test_resnet", drop_rate=0.3, drop_path_rate=0.1)
    model.set_grad_checkpointing()
    model.layer1[0].label = "first"
    model.layer1[0].forward = model.layer1[0].forward  # as accelerate leaves it
    model.act1.inplace = False
    freeze_batchnorm(convert_sync_batchnorm(model), include="bn1")
    save_model(model, tmp_path / "model")
    assert type(load_model(tmp_path / "model").layer1[0].bn1) is SyncBatchNorm2d  # type: ignore


def test_hooks_are_said_and_the_rest_is_kept(tmp_path: Path) -> None:
    model: Any = timm.create_model("test_resnet")
    model.layer1.register_forward_hook(lambda _m, _x, y: 2 * y)
    with pytest.warns(
        UserWarning, match="layer1 has forward hooks, which the folder does not hold"
    ):
        save_model(model, tmp_path / "model")
    x = torch.randn(2, 3, 64, 64)
    loaded: Any = load_model(tmp_path / "model")
    loaded.layer1.register_forward_hook(lambda _m, _x, y: 2 * y)
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_a_form_that_timm_cannot_describe_is_saved_and_said(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", features_only=True)
    with pytest.warns(UserWarning, match="timm cannot describe the model .*num_classes"):
        save_model(model, tmp_path / "model")
    with pytest.raises(BnconvertError, match="names no timm architecture"):
        load_model(tmp_path / "model")
    kept = load_checkpoint(tmp_path / "model").tensors
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_what_timm_has_frozen_comes_back_frozen(tmp_path: Path, name: str) -> None:
    model = timm.create_model(name)
    randomize_batchnorm(model)
    model = timm.layers.freeze_batch_norm_2d(model)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model").train()
    assert all(frozen_state(m) for m in loaded.modules() if isinstance(m, nn.BatchNorm2d))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded.train()(x), model.eval()(x), rtol=1e-5, atol=1e-5)


def test_unused_statistics_stay_unused(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet").eval()
    randomize_batchnorm(model)
    model.bn1.track_running_stats = False
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    norms = [(n, m) for n, m in loaded.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [name for name, norm in norms if not norm.track_running_stats] == ["bn1"]


def test_a_folded_model_comes_back_folded_and_fails_loudly_elsewhere(tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=5).eval()
    randomize_batchnorm(model)
    x = torch.randn(2, 3, 64, 64)
    fold_batchnorm(model, x)
    save_model(model, tmp_path / "folded")
    loaded = load_model(tmp_path / "folded").eval()
    assert not inspect_batchnorm(loaded).layers
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(BnconvertError, match="missing"):
        load_model("resnet18", tmp_path / "folded" / "model.safetensors")


def test_wrappers_are_taken_off_before_saving(tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=5)
    compiled: Any = torch.compile(model)
    save_model(compiled, tmp_path / "compiled")
    assert load_model(tmp_path / "compiled").state_dict().keys() == model.state_dict().keys()


def test_a_checkpoint_of_another_architecture_says_which_keys(folder: Path) -> None:
    with pytest.raises(BnconvertError, match=r"missing .*more.*not in the model") as caught:
        load_model("mobilenetv3_small_050", folder / "model.safetensors")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet5", "did you mean resnet50"),
        ("nothing_like_it_at_all", "neither a timm model, nor a folder"),
        ("no_such_module:model", r"importing no_such_module failed \(ModuleNotFoundError"),
        ("os:nothing", "os has no attribute nothing"),
        ("os:sep", "is a str; name a function or a class"),
        (f"{__name__}:failing", r"calling it without arguments failed \(RuntimeError: no luck\)"),
        (f"{__name__}:returns_a_list", r"returned a list; it must return a torch.nn.Module"),
    ],
)
def test_unknown_models_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(BnconvertError, match=message) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"architecture": "os:system"}', "is not a timm model"),
        ('{"architecture": "resnet18", "num_classes": "many"}', "timm cannot build"),
    ],
)
def test_damaged_folders_are_one_line(tmp_path: Path, config: str | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(BnconvertError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unknown_schema_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["bnconvert"]["schema"] = 99
    path.write_text(json.dumps(config))
    with pytest.raises(BnconvertError, match="newer bnconvert"):
        load_model(folder)


def test_an_existing_folder_is_refused_and_replaced_on_request(folder: Path) -> None:
    model = timm.create_model("resnet18", num_classes=5)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(BnconvertError, match="exists; use --force"):
        save_model(model, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    save_model(model, folder, overwrite=True)
    assert type(load_model(folder).bn1) is nn.BatchNorm2d
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    other = folder.parent / "photos"
    other.mkdir()
    (other / "cat.jpg").write_bytes(b"")
    with pytest.raises(BnconvertError, match="is no model folder"):
        save_model(model, other, overwrite=True)
    with pytest.raises(BnconvertError, match="there is no such folder"):
        save_model(model, folder.parent / "a" / "b")
