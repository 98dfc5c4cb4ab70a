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


def pruned(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 0.3)  # type: ignore[no-untyped-call]


def parametrized(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", nn.Softplus(), unsafe=True)


UNDO: dict[Any, Any] = {
    pruned: lambda layer: prune.remove(layer, "weight"),  # type: ignore[no-untyped-call]
    parametrized: lambda layer: parametrize.remove_parametrizations(layer, "weight"),
}


@pytest.mark.parametrize("change", UNDO, ids=lambda change: change.__name__)
@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("added", [True, False])
def test_flags_come_back_to_a_weight_that_was_rebuilt_while_frozen(
    change: Any, trained: str, added: bool
) -> None:
    layer = nn.BatchNorm2d(4)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == trained)
    if not added:
        change(layer)
    bc.freeze_batchnorm(layer)
    change(layer) if added else UNDO[change](layer)
    bc.freeze_batchnorm(layer)  # again, which changes nothing
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    bc.unfreeze_batchnorm(layer)
    flags = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
    assert len(flags) == 2
    assert all(required == (trained in name) for name, required in flags.items())


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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:.*FSDP.*NO_SHARD", "ignore::FutureWarning")
def test_weights_in_a_flat_parameter_are_refused_and_their_values_not_read() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    assert bc.inspect_batchnorm(flat).layers[0].affine == "trained"
    for stats in (True, False):
        with pytest.raises(bc.BnconvertError, match=r"\.1: its weight and bias cannot be frozen"):
            bc.freeze_batchnorm(flat, stats=stats)
    bc.freeze_batchnorm(flat, affine=False)
    assert type(model[1]).__name__ == "FrozenBatchNorm2d"
    flat(torch.randn(2, 3, 4, 4)).sum().backward()
    assert int(model[1].num_batches_tracked) == 0
