"""Which parameters freezing holds, and when they are trained again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import bnconvert as bc
from bnconvert.testing import randomize_batchnorm
from tests.test_freeze import assert_same_state, snapshot


def test_an_optimizer_made_before_freezing_does_not_move_frozen_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))
    randomize_batchnorm(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.randn(4, 3, 2, 2)
    model(x).square().sum().backward()
    optimizer.step()
    model(x).square().sum().backward()  # leaves a gradient behind
    bc.freeze_batchnorm(model).train()
    before = snapshot(model[1])
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
    assert_same_state(model[1], before)
    bc.unfreeze_batchnorm(model)
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["1.weight"], before["weight"])


def test_parameters_shared_by_two_layers_come_back_trainable() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    bc.freeze_batchnorm(model)
    assert not any(p.requires_grad for p in model.parameters())
    bc.unfreeze_batchnorm(model)
    assert all(p.requires_grad for p in model.parameters())


def test_a_shared_parameter_is_trained_again_when_its_last_layer_is() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(3)))
    model[1].weight = model[0].weight
    model[2].weight = model[0].weight
    for name in "012":
        bc.freeze_batchnorm(model, include=name)
    for name in "20":
        bc.unfreeze_batchnorm(model, include=name)
        assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    bc.unfreeze_batchnorm(model, include="1")
    assert all(p.requires_grad for p in model.parameters())


def with_property(layer: nn.Module) -> None:
    class Gamma(nn.BatchNorm2d):
        @property
        def weight(self) -> Any:  # type: ignore[override]
            return self.gamma

    layer.register_parameter("gamma", layer._parameters.pop("weight"))
    layer.__class__ = Gamma


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.random_unstructured(layer, "weight", 0.3),  # type: ignore[no-untyped-call]
        lambda layer: nn.utils.weight_norm(layer, dim=0),
        lambda layer: parametrize.register_parametrization(layer, "bias", nn.Tanh()),
        with_property,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_weight_and_bias_are_made_of_is_frozen_too(change: Any) -> None:
    layer = nn.BatchNorm2d(4)
    change(layer)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer)
    bc.freeze_batchnorm(model)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    bc.unfreeze_batchnorm(model)
    assert all(parameter.requires_grad for parameter in layer.parameters())
