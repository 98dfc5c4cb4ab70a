"""Freezing: nothing moves, everything comes back."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import bnconvert as bc
from bnconvert.layers import Kind, kind_of
from bnconvert.testing import TOLERANCES, randomize_batchnorm, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def act_layer(channels: int) -> nn.Module:
    layer: nn.Module = BatchNormAct2d(channels, act_layer=nn.SiLU)
    return layer


FAMILIES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (6, 5)),
    "1d with length": (nn.BatchNorm1d, (6, 5, 4)),
    "2d": (nn.BatchNorm2d, (3, 5, 4, 4)),
    "3d": (nn.BatchNorm3d, (2, 5, 3, 2, 2)),
    "act2d": (act_layer, (3, 5, 4, 4)),
    "sync1d": (bc.SyncBatchNorm1d, (6, 5)),
    "sync2d": (bc.SyncBatchNorm2d, (3, 5, 4, 4)),
    "sync3d": (bc.SyncBatchNorm3d, (2, 5, 3, 2, 2)),
    "syncact2d": (bc.SyncBatchNormAct2d, (3, 5, 4, 4)),
    "torch sync": (nn.SyncBatchNorm, (3, 5, 4, 4)),
    "timm sync act": (SyncBatchNormAct, (3, 5, 4, 4)),
}
FROZEN_CLASS = {
    "1d": bc.FrozenBatchNorm1d,
    "1d with length": bc.FrozenBatchNorm1d,
    "2d": bc.FrozenBatchNorm2d,
    "3d": bc.FrozenBatchNorm3d,
    "act2d": bc.FrozenBatchNormAct2d,
    "sync1d": bc.FrozenBatchNorm1d,
    "sync2d": bc.FrozenBatchNorm2d,
    "sync3d": bc.FrozenBatchNorm3d,
    "syncact2d": bc.FrozenBatchNormAct2d,
}
families = pytest.mark.parametrize("family", FAMILIES)


def make(family: str) -> tuple[nn.Module, torch.Tensor]:
    build, shape = FAMILIES[family]
    layer: nn.Module = build(shape[1])
    if isinstance(layer, SyncBatchNormAct):
        layer.act, layer.drop = nn.SiLU(), nn.Identity()
    randomize_batchnorm(layer)
    generator = torch.Generator().manual_seed(1)
    return layer, torch.randn(shape, generator=generator) * 3 + 1


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = module.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@families
def test_a_frozen_layer_in_train_mode_gives_its_eval_output_bit_for_bit(family: str) -> None:
    layer, x = make(family)
    expected = layer.eval()(x)
    before = snapshot(layer)
    bc.freeze_batchnorm(layer).train()
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected)
    assert_same_state(layer, before)
    assert kind_of(layer) is Kind.FROZEN


@families
def test_unfreezing_restores_class_attributes_and_parameter_identity(family: str) -> None:
    layer, _ = make(family)
    layer.weight.requires_grad_(False)
    cls, attributes = type(layer), dict(layer.__dict__)
    parameters = dict(layer.named_parameters())
    bc.unfreeze_batchnorm(bc.freeze_batchnorm(layer))
    assert type(layer) is cls
    assert layer.__dict__ == attributes
    assert all(dict(layer.named_parameters())[n] is p for n, p in parameters.items())
    assert [p.requires_grad for p in layer.parameters()] == [False, True]


@pytest.mark.parametrize("family", FROZEN_CLASS)
def test_the_frozen_class_has_the_public_name_and_is_the_stock_layer_too(family: str) -> None:
    layer, _ = make(family)
    bc.freeze_batchnorm(layer)
    assert type(layer) is FROZEN_CLASS[family]
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)


@families
def test_frozen_layers_survive_deepcopy_pickle_and_torch_save(family: str) -> None:
    layer, x = make(family)
    expected = bc.freeze_batchnorm(layer).train()(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),  # noqa: S301 (made one line above)
        torch.load(buffer, weights_only=False),
    )
    for copied in copies:
        assert type(copied) is type(layer)
        assert torch.equal(copied.train()(x), expected)
        assert all(p.requires_grad for p in bc.unfreeze_batchnorm(copied).parameters())


def test_the_gradient_goes_through_a_frozen_layer_as_through_an_affine_map() -> None:
    layer = nn.BatchNorm2d(5).double()
    randomize_batchnorm(layer)
    bc.freeze_batchnorm(layer)
    x = torch.randn(3, 5, 4, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 5, 4, 4, dtype=torch.float64)
    layer(x).backward(grad)
    assert layer.weight is not None
    assert layer.running_var is not None
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    torch.testing.assert_close(x.grad, grad * scale.view(1, -1, 1, 1), rtol=1e-12, atol=1e-12)
    assert layer.weight.grad is None


def test_statistics_alone_are_frozen_while_weight_and_bias_learn() -> None:
    layer, x = make("2d")
    before = snapshot(layer)
    bc.freeze_batchnorm(layer, affine=False).train()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(x).square().sum().backward()
    optimizer.step()
    after = layer.state_dict()
    assert torch.equal(after["running_mean"], before["running_mean"])
    assert torch.equal(after["running_var"], before["running_var"])
    assert not torch.equal(after["bias"], before["bias"])


@pytest.mark.parametrize("family", ["2d", "sync2d", "act2d"])
def test_weight_and_bias_alone_are_frozen_while_statistics_move(family: str) -> None:
    layer, x = make(family)
    before, cls = snapshot(layer), type(layer)
    bc.freeze_batchnorm(layer, stats=False).train()
    assert not torch.equal(layer(x), layer.eval()(x))
    after = layer.state_dict()
    assert not torch.equal(after["running_mean"], before["running_mean"])
    assert not any(p.requires_grad for p in layer.parameters())
    bc.unfreeze_batchnorm(layer)
    assert type(layer) is cls
    assert all(p.requires_grad for p in layer.parameters())


def test_freezing_in_two_steps_equals_freezing_at_once_and_is_undone_at_once() -> None:
    layer, _ = make("2d")
    bc.freeze_batchnorm(layer, stats=False)
    bc.freeze_batchnorm(layer, affine=False)
    assert type(layer) is bc.FrozenBatchNorm2d
    assert not any(p.requires_grad for p in layer.parameters())
    assert bc.plan_freeze_batchnorm(layer).report.left[0].reason == "it is frozen already"
    bc.unfreeze_batchnorm(layer)
    assert type(layer) is nn.BatchNorm2d
    assert all(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_input_keeps_its_dtype_also_under_autocast(dtype: torch.dtype) -> None:
    layer, x = make("2d")
    expected = layer.eval()(x)
    bc.freeze_batchnorm(layer).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x.to(dtype))
    assert output.dtype is dtype
    torch.testing.assert_close(output.float(), expected, **TOLERANCES[dtype]._asdict())


def test_patterns_freeze_the_backbone_and_leave_the_rest() -> None:
    model = timm.create_model("resnet18")
    plan = bc.plan_freeze_batchnorm(model, exclude=["layer4.*"])
    assert (plan.report.count(bc.Outcome.FROZEN), len(plan.report.left)) == (15, 5)
    assert {layer.reason for layer in plan.report.left} == {"it is excluded by 'layer4.*'"}
    assert not any(kind_of(m) is Kind.FROZEN for m in model.modules())
    plan.apply()
    bc.convert_sync_batchnorm(model)
    assert type(model.bn1) is bc.FrozenBatchNorm2d
    assert type(model.layer4[0].bn1) is bc.SyncBatchNorm2d


ORDERS = [
    ("convert", "freeze", "unfreeze", "revert"),
    ("convert", "freeze", "revert", "unfreeze"),
    ("freeze", "convert", "unfreeze", "revert"),
    ("freeze", "convert", "revert", "unfreeze"),
]
VERBS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "convert": bc.convert_sync_batchnorm,
    "revert": bc.revert_sync_batchnorm,
    "freeze": bc.freeze_batchnorm,
    "unfreeze": bc.unfreeze_batchnorm,
}


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0"])
def test_freezing_and_converting_come_back_in_any_order(name: str, order: tuple[str, ...]) -> None:
    model = timm.create_model(name)
    randomize_batchnorm(model)
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    state, flags = snapshot(model), [p.requires_grad for p in model.parameters()]
    for verb in order:
        VERBS[verb](model)
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == before
    assert [p.requires_grad for p in model.parameters()] == flags
    assert_same_state(model, state)


def test_reverting_while_frozen_is_reported_and_the_layer_stays_frozen() -> None:
    layer = bc.freeze_batchnorm(bc.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3))))
    report = bc.plan_revert_sync_batchnorm(layer).report
    assert report.count(bc.Outcome.REVERTED) == 1
    assert type(bc.revert_sync_batchnorm(layer)[0]) is bc.FrozenBatchNorm2d
    assert type(bc.unfreeze_batchnorm(layer)[0]) is nn.BatchNorm2d


def test_the_process_group_survives_freezing() -> None:
    assert run_ranks(check_group, 2) == [True, True]


def check_group(rank: int) -> bool:
    import torch.distributed as dist

    groups: list[Any] = [dist.new_group([r]) for r in range(2)]
    layer: Any = bc.convert_sync_batchnorm(nn.BatchNorm2d(3), groups[rank])
    bc.unfreeze_batchnorm(bc.freeze_batchnorm(layer))
    return bool(layer.process_group is groups[rank])


def test_a_forward_replaced_after_freezing_is_refused_by_name() -> None:
    model: Any = nn.Sequential(bc.freeze_batchnorm(nn.BatchNorm2d(3)), nn.BatchNorm2d(3))
    old: Any = model[0].forward
    model[0].forward = lambda x: old(x)
    with pytest.raises(bc.BnconvertError, match=r"1 layers .* they were frozen \(0\); undo that"):
        bc.unfreeze_batchnorm(model)
    model[0].forward = old
    bc.unfreeze_batchnorm(model)
    model[0].reset_running_stats()
    model(torch.randn(4, 3, 2, 2))
    assert model[0].running_mean.abs().sum() > 0


def test_a_parametrized_layer_is_frozen_below_its_generated_class() -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    layer, x = make("2d")
    parametrize.register_parametrization(layer, "weight", Double())
    cls, expected = type(layer), layer.eval()(x)
    bc.freeze_batchnorm(layer).train()
    assert torch.equal(layer(x), expected)
    assert not any(p.requires_grad for p in layer.parameters())
    bc.unfreeze_batchnorm(layer)
    assert type(layer) is cls
    assert all(p.requires_grad for p in layer.parameters())
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.BatchNorm2d


def test_update_bn_leaves_frozen_statistics_alone() -> None:
    model: Any = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    randomize_batchnorm(model)
    bc.freeze_batchnorm(model, include="0")
    frozen, live = (copy.deepcopy(model[place].state_dict()) for place in (0, 2))
    torch.optim.swa_utils.update_bn([torch.randn(4, 4, 3, 3)], model)
    torch.testing.assert_close(model[0].state_dict(), frozen, rtol=0, atol=0)
    assert not torch.equal(model[2].running_mean, live["running_mean"])
    bc.unfreeze_batchnorm(model)
    model[0].reset_running_stats()
    assert not model[0].running_mean.any()


def test_layers_that_cannot_be_frozen_are_left_with_the_deciding_value() -> None:
    model = nn.ModuleDict(
        {
            "nostats": nn.BatchNorm2d(3, track_running_stats=False),
            "noaffine": nn.BatchNorm2d(3, affine=False),
            "lazy": nn.LazyBatchNorm2d(),
            "fine": nn.BatchNorm2d(3),
        }
    )
    report = bc.plan_freeze_batchnorm(model).report
    reasons = {layer.name: layer.reason for layer in report.left}
    assert "track_running_stats=False" in reasons["nostats"]
    assert "no channels yet" in reasons["lazy"]
    assert set(reasons) == {"nostats", "lazy"}
    affine = bc.plan_freeze_batchnorm(model, stats=False).report
    assert "affine=False" in {layer.name: layer.reason for layer in affine.left}["noaffine"]
    assert affine.count(bc.Outcome.FROZEN) == 2


class Scaled(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


def test_unknown_layers_are_refused_by_name_and_nothing_is_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), Scaled(3))
    with pytest.raises(bc.BnconvertError, match=r"1: Scaled overrides forward"):
        bc.freeze_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    assert all(p.requires_grad for p in model.parameters())
    bc.freeze_batchnorm(model, exclude="1")
    assert type(model[0]) is bc.FrozenBatchNorm2d


def test_freezing_nothing_is_refused() -> None:
    with pytest.raises(bc.BnconvertError, match="both False"):
        bc.freeze_batchnorm(nn.BatchNorm2d(3), stats=False, affine=False)


def test_a_frozen_layer_made_directly_thaws_to_the_stock_layer() -> None:
    layer = bc.FrozenBatchNorm2d(4, eps=1e-3)
    assert not any(p.requires_grad for p in layer.parameters())
    with pytest.raises(ValueError, match="4D input"):
        layer(torch.randn(2, 4))
    assert type(bc.unfreeze_batchnorm(layer)) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="running statistics"):
        bc.FrozenBatchNorm2d(4, track_running_stats=False)


def test_frozen_layers_do_not_move_in_twenty_steps_of_ddp() -> None:
    assert run_ranks(train_frozen, 2) == [True, True]


def train_frozen(rank: int) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
    )
    randomize_batchnorm(model)
    bc.convert_sync_batchnorm(bc.freeze_batchnorm(model, include="1"))
    frozen, live = snapshot(model[1]), snapshot(model[4])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(20):
        model.train()
        torch.manual_seed(100 * rank + step)
        optimizer.zero_grad()
        ddp(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    assert_same_state(model[1], frozen)
    return not torch.equal(model.state_dict()["4.running_mean"], live["running_mean"])


def test_reset_parameters_fills_memory_that_holds_anything() -> None:
    layer = bc.freeze_batchnorm(nn.BatchNorm2d(3, device="meta")).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
            tensor.fill_(7.0)  # type: ignore[union-attr]
    layer.reset_parameters()
    fresh = nn.BatchNorm2d(3).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in layer.state_dict().items())
    layer.running_mean.fill_(7.0)  # type: ignore[union-attr]
    layer.reset_running_stats()
    assert torch.equal(layer.running_mean, torch.full((3,), 7.0))  # type: ignore[arg-type]
