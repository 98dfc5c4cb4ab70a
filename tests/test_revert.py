"""Reverting layers of other libraries, by their class names."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from timm.layers import convert_sync_batchnorm as timm_convert
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bnconvert import (
    BnconvertError,
    Outcome,
    SyncBatchNorm2d,
    freeze_batchnorm,
    is_synchronized,
    plan_revert_sync_batchnorm,
    revert_sync_batchnorm,
)
from bnconvert.testing import randomize_batchnorm

torch_convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm


def foreign_class(library: str, name: str, base: type, **members: Any) -> type:
    """Return a class as another library defines it."""
    return type(name, (base,), {"__module__": f"{library}.layers", **members})


class OneTwoThree(nn.Module):
    """Uses layers of all dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(4)
        self.one_with_length = nn.BatchNorm1d(4)
        self.two = nn.BatchNorm2d(4)
        self.three = nn.BatchNorm3d(4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        image = self.two(input=x * scale)
        sequence = self.one_with_length(image.flatten(2))
        volume = self.three(sequence.unflatten(2, (2, 2, -1)))
        result: Tensor = self.one(volume.mean((2, 3, 4)))
        return result


def test_torch_layers_get_the_class_that_fits_their_input() -> None:
    model = OneTwoThree().eval()
    randomize_batchnorm(model)
    x = torch.randn(3, 4, 4, 3)
    before = model(x)
    synced = torch_convert(model).train()
    hook = synced.two.register_forward_hook(lambda *_: None)
    state = {name: value.clone() for name, value in synced.state_dict().items()}
    parameters = [id(p) for p in synced.parameters()]
    with pytest.raises(BnconvertError, match=r"one, one_with_length, two, three: .*example_inputs"):
        revert_sync_batchnorm(synced)
    random_state = torch.get_rng_state()
    plan = plan_revert_sync_batchnorm(synced, example_inputs={"x": x, "scale": 2.0})
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(type(m) is nn.SyncBatchNorm for m in synced.children())
    assert all(m.training for m in synced.modules())
    assert list(synced.two._forward_hooks) == [hook.id]
    assert not synced.two._forward_pre_hooks
    plan.apply()
    assert [type(m) for m in synced.children()] == [
        nn.BatchNorm1d,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
    ]
    assert [id(p) for p in synced.parameters()] == parameters
    for name, value in synced.state_dict().items():
        assert torch.equal(value, state[name]), name
    hook.remove()
    assert sorted(synced.one.__dict__) == sorted(nn.BatchNorm1d(4).__dict__)
    pickle.dumps(synced)
    assert torch.equal(synced.eval()(x), before)


@pytest.mark.parametrize("example", [torch.zeros(2, 4, 4, 2), (torch.zeros(2, 4, 4, 2), 1.0)])
def test_example_inputs_are_a_tensor_or_a_tuple(example: Any) -> None:
    model = torch_convert(OneTwoThree())
    revert_sync_batchnorm(model, example_inputs=example)
    assert type(model.three) is nn.BatchNorm3d


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(2, 5, 4, 2), "the model does not run on them"),
        ("x", "expected a tensor, a tuple of positional or a dict of keyword arguments, got str"),
        ({"y": 1}, "the model does not run on them"),
    ],
)
def test_inputs_that_do_not_fit_are_one_line_and_change_nothing(example: Any, message: str) -> None:
    model = torch_convert(OneTwoThree())
    with pytest.raises(BnconvertError, match=message) as caught:
        revert_sync_batchnorm(model, example_inputs=example)
    assert "\n" not in str(caught.value)
    assert type(model.three) is nn.SyncBatchNorm
    assert model.training
    assert not model.three._forward_pre_hooks


def test_a_layer_that_the_example_does_not_reach_is_an_error() -> None:
    model: Any = nn.Sequential(nn.SyncBatchNorm(3))
    model[0].register_module("unused", nn.SyncBatchNorm(3))
    with pytest.raises(BnconvertError, match=r"0\.unused: not reached"):
        revert_sync_batchnorm(model, example_inputs=torch.zeros(2, 3, 2, 2))
    assert is_synchronized(model[0])
    revert_sync_batchnorm(model, example_inputs=torch.zeros(2, 3, 2, 2), exclude="0.unused")
    assert type(model[0]) is nn.BatchNorm2d


def test_timm_layers_keep_their_activation() -> None:
    model = timm.create_model("densenet121", num_classes=3).eval()
    randomize_batchnorm(model)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = model(x)
        types = {name: type(m) for name, m in model.named_modules()}
        model = timm_convert(model)
        revert_sync_batchnorm(model)
        assert {name: type(m) for name, m in model.named_modules()} == types
        assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    ("cls", "attributes"),
    [
        (
            foreign_class("apex", "SyncBatchNorm", _BatchNorm, _check_input_dim=lambda s, x: None),
            {"process_group": None, "channel_last": False, "fuse_relu": False},
        ),
        (foreign_class("detectron2", "NaiveSyncBatchNorm", nn.BatchNorm2d), {"_stats_mode": ""}),
        (foreign_class("sync_batchnorm", "SynchronizedBatchNorm2d", nn.BatchNorm2d), {}),
        (
            foreign_class("mmcv", "SyncBatchNorm", nn.BatchNorm2d),
            {"group": None, "group_size": 2, "stats_mode": "default"},
        ),
        (foreign_class("mine", "Subclass", nn.SyncBatchNorm), {"process_group": None}),
    ],
)
def test_layers_of_other_libraries_become_stock(cls: type, attributes: dict[str, Any]) -> None:
    layer = cls(4)
    layer.__dict__.update(attributes)
    randomize_batchnorm(layer)
    model = nn.Sequential(layer)
    weight = layer.weight
    revert_sync_batchnorm(model, example_inputs=torch.zeros(2, 4, 3, 3))
    assert type(layer) is nn.BatchNorm2d
    assert layer.weight is weight
    assert sorted(layer.__dict__) == sorted(nn.BatchNorm2d(4).__dict__)


def test_a_fused_activation_is_left_with_the_reason() -> None:
    cls = foreign_class("apex", "SyncBatchNorm", _BatchNorm, _check_input_dim=lambda s, x: None)
    layer = cls(4)
    layer.fuse_relu = True
    report = plan_revert_sync_batchnorm(layer).report
    assert report.left[0].reason == "its fuse_relu is True, which a stock layer does not do"


def test_subclasses_with_code_of_their_own_are_refused() -> None:
    torch_like = foreign_class("mine", "Mine", nn.SyncBatchNorm, forward=lambda self, x: x)
    ours = foreign_class("mine", "Ours", SyncBatchNorm2d)
    model = nn.Sequential(torch_like(3), ours(3))
    with pytest.raises(BnconvertError, match="2 synchronised layers cannot be made plain"):
        revert_sync_batchnorm(model, example_inputs=torch.zeros(2, 3, 2, 2))


def test_own_layers_used_directly_become_stock() -> None:
    layer = SyncBatchNorm2d(3, eps=1e-3, momentum=None)
    assert plan_revert_sync_batchnorm(layer).report.count(Outcome.REVERTED) == 1
    revert_sync_batchnorm(layer)
    assert type(layer) is nn.BatchNorm2d
    assert (layer.eps, layer.momentum) == (1e-3, None)
    assert sorted(layer.__dict__) == sorted(nn.BatchNorm2d(3).__dict__)


def test_plain_layers_are_left() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    report = plan_revert_sync_batchnorm(model).report
    assert report.left[0].reason == "it is not synchronised (plain)"


def test_activations_that_torchs_converter_dropped_come_back() -> None:
    model = timm.create_model("test_efficientnet").eval()
    randomize_batchnorm(model)
    types, x = [type(m) for m in model.modules()], torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        torch_convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        damaged = torch_convert(copy.deepcopy(model)).eval()
        revert_sync_batchnorm(damaged, example_inputs=x)
        assert torch.equal(damaged(x), expected)
    assert [type(m) for m in damaged.modules()] == types


def test_a_frozen_layer_that_torch_synchronises_is_left_with_the_way_out() -> None:
    model = freeze_batchnorm(nn.Sequential(nn.SyncBatchNorm(3)))
    (left,) = plan_revert_sync_batchnorm(model).report.left
    assert left.reason == (
        "it is frozen, and synchronised by torch once unfrozen; unfreeze it first"
    )
