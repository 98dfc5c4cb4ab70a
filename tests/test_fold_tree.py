"""Folding on module trees: what is kept and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from bnconvert import BnconvertError, fold_batchnorm, plan_fold_batchnorm
from bnconvert.report import Outcome
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import check_folds, conv_bn, image


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "training": [module.training for module in model.modules()],
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "parameters": [
            (name, id(value), value.requires_grad) for name, value in model.named_parameters()
        ],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    tensors, others = before.pop("tensors"), after.pop("tensors")
    assert before == after
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


# -- what stays ---------------------------------------------------------------------------------


def test_planning_changes_nothing() -> None:
    model = conv_bn()
    before = state(model)
    plan = plan_fold_batchnorm(model, image())
    assert_unchanged(model, before)
    assert plan.report.count(Outcome.FOLDED) == 1
    assert "into 0" in str(plan)


def test_parameters_keep_their_objects_and_flags() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)).eval()
    randomize_batchnorm(model)
    weight, bias = model[0].weight, model[0].bias
    weight.requires_grad_(False)
    assert fold_batchnorm(model, image()) is model
    assert model[0].weight is weight
    assert model[0].bias is bias
    assert not weight.requires_grad
    assert bias.requires_grad


def test_an_added_bias_matches_the_weight() -> None:
    model = conv_bn().to(torch.bfloat16, memory_format=torch.channels_last)
    model.requires_grad_(False)
    fold_batchnorm(model, image().bfloat16())
    bias = model[0].bias
    assert bias.dtype is torch.bfloat16
    assert not bias.requires_grad
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_new_modules_have_the_training_flag_of_the_model() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    fold_batchnorm(model, image())
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())


def test_plain_references_see_the_folded_layer() -> None:
    model = conv_bn()
    listed = [model[1]]
    fold_batchnorm(model, image())
    assert listed[0] is model[1]
    assert type(listed[0]) is nn.Identity


def test_the_folded_model_can_do_what_the_original_could() -> None:
    model = nn.Sequential(*conv_bn(), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    randomize_batchnorm(model)
    x = image()
    fold_batchnorm(model, x)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 (our own)
        torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_folded_weights_do_not_load_into_an_unfolded_model() -> None:
    model, other = conv_bn(), conv_bn()
    fold_batchnorm(model, image())
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(model.state_dict())


def test_folding_twice_changes_nothing() -> None:
    model = nn.Sequential(*conv_bn(), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    randomize_batchnorm(model)
    fold_batchnorm(model, image())
    before = state(model)
    plan = plan_fold_batchnorm(model, image())
    assert plan.report.layers == ()
    plan.apply()
    assert_unchanged(model, before)


# -- what raises --------------------------------------------------------------------------------


def refused(model: nn.Module, inputs: Any, match: str, **options: Any) -> None:
    before = state(model)
    with pytest.raises(BnconvertError, match=match):
        fold_batchnorm(model, inputs, **options)
    assert_unchanged(model, before)


def test_training_mode_is_refused_by_name() -> None:
    model = conv_bn()
    model[1].train()
    refused(model, image(), "fold: 1: in training mode")


def test_inputs_that_do_not_fit_are_refused() -> None:
    refused(conv_bn(), torch.randn(2, 5, 8, 8), r"does not run on example_inputs of shape \(2, 5")
    refused(conv_bn(), "image", "got str")
    refused(conv_bn(), (), "holds no tensor")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = conv_bn()

    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:
            return self.body(x)
        return -self.body(x)


def test_control_flow_on_data_is_refused_with_its_place() -> None:
    refused(Branches().eval(), image(), r"cannot be captured as a graph at .*test_fold_tree.py:\d+")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("running_var", -1.0, "1: its scale: channel 2 has the value nan"),
        ("running_mean", float("inf"), "1: its shift: channel 2 has the value"),
        ("weight", float("nan"), "1: its scale: channel 2 has the value nan"),
    ],
)
def test_values_that_are_not_finite_are_refused(name: str, value: float, text: str) -> None:
    model = conv_bn()
    with torch.no_grad():
        getattr(model[1], name)[2] = value
    x = image()
    with pytest.raises(BnconvertError, match=text):
        fold_batchnorm(model, x)


def test_values_that_overflow_the_dtype_are_refused() -> None:
    model = conv_bn().half()
    with torch.no_grad():
        model[1].weight[1] = 6e4
        model[1].running_var[1] = 1e-4
    with pytest.raises(BnconvertError, match=r"1: its scale: channel 1 .* overflows float16"):
        fold_batchnorm(model, image().half())
    model = conv_bn().half()
    with torch.no_grad():
        model[0].weight[1] *= 1e4
        model[1].weight[1] = 500.0
    with pytest.raises(BnconvertError, match=r"0.weight: channel 1 .* overflows float16"):
        fold_batchnorm(model, image().half())


def test_a_plan_does_not_outlive_a_change_of_the_weights() -> None:
    model = conv_bn()
    plan = plan_fold_batchnorm(model, image())
    with torch.no_grad():
        model[0].weight.mul_(2)
    before = state(model)
    with pytest.raises(BnconvertError, match="make a new plan"):
        plan.apply()
    assert_unchanged(model, before)


def test_a_failed_proof_changes_nothing_and_names_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bnconvert.fold.sites import Site

    right = Site.new_bias
    monkeypatch.setattr(Site, "new_bias", lambda site: right(site) * (1 + 1e-7))  # type: ignore[operator]
    refused(conv_bn(), image(), "float64 the folded model differs .* first layer to differ is 1;")


# -- weights that are computed ------------------------------------------------------------------


def pruned() -> nn.Module:
    conv = nn.Conv2d(6, 4, 3)
    prune.random_unstructured(conv, "weight", 0.5)  # type: ignore[no-untyped-call]
    return conv


COMPUTED: dict[str, Any] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(6, 4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(6, 4, 3, bias=False)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Conv2d(6, 4, 3)),
    "pruned": pruned,
    "old spectral norm": lambda: spectral_norm(nn.Conv2d(6, 4, 3)),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_computed_weights_become_plain(kind: str) -> None:
    conv = COMPUTED[kind]().double()
    conv(image().double())  # leaves computed tensors behind, which deepcopy refuses
    model = nn.Sequential(conv, nn.BatchNorm2d(4))
    check_folds(model, image())
    assert type(model[0]) is nn.Conv2d
    assert set(dict(model[0].named_parameters())) == {"weight", "bias"}
    pickle.dumps(model)


def test_old_weight_norm_becomes_plain() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        conv = weight_norm(nn.Conv2d(6, 4, 3))
    conv = conv.double()
    conv(image().double())
    model = nn.Sequential(conv, nn.BatchNorm2d(4))
    check_folds(model, image())
    assert not conv._forward_pre_hooks


# -- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    model = conv_bn().to(dtype)
    conv, bn = model[0], model[1]
    scale = bn.weight.double() * (bn.running_var.double() + bn.eps).rsqrt()
    weight = (conv.weight.double() * scale.reshape(-1, 1, 1, 1)).to(dtype)
    bias = (bn.bias.double() - bn.running_mean.double() * scale).to(dtype)
    fold_batchnorm(model, image().to(dtype))
    torch.testing.assert_close(conv.weight, weight, rtol=0, atol=0, check_stride=False)
    torch.testing.assert_close(conv.bias, bias, rtol=0, atol=0)


@pytest.mark.parametrize(("mean", "var"), [(0.0, 0.0), (1000.0, 1e-3)])
def test_extreme_statistics(mean: float, var: float) -> None:
    model = conv_bn().double()
    with torch.no_grad():
        model[1].running_mean.fill_(mean)
        model[1].running_var.fill_(var)
    x = image().double()
    expected = model(x)
    fold_batchnorm(model, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)


def test_a_saved_model_loads_into_the_rebuilt_structure() -> None:
    from bnconvert.fold.topology import describe_topology, rebuild_topology

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            parametrizations.weight_norm(nn.Conv2d(6, 6, 3, bias=False)),
            nn.BatchNorm2d(6),
            nn.GELU(),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 1, bias=False),
        ).eval()

    model = build()
    randomize_batchnorm(model)
    assert describe_topology(model) == {}
    fold_batchnorm(model, image())
    topology = describe_topology(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = build()
    rebuild_topology(other, topology)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(other(image()), model(image()), rtol=0, atol=0)
    assert describe_topology(other) == topology
    wrong = nn.Sequential(nn.Linear(3, 3))
    before = state(wrong)
    with pytest.raises(BnconvertError, match="build the architecture that was folded"):
        rebuild_topology(wrong, topology)
    assert_unchanged(wrong, before)
