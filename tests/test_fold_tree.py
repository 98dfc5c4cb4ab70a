"""Folding on module trees: what is kept, what is refused, and what is left with which reason."""

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
from tests.fold_support import Steps, check_folds, image


def conv_bn() -> Any:
    model = nn.Sequential(nn.Conv2d(6, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
    randomize_batchnorm(model)
    return model


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


# -- what is left -------------------------------------------------------------------------------


def left(model: nn.Module, x: Tensor | None = None, folded: int = 0, **options: Any) -> str:
    """Return the reason of the only layer that folding leaves."""
    report = check_folds(model, image() if x is None else x, folded, 1, **options)
    return report.left[0].reason


def test_a_producer_that_is_read_elsewhere() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        return bn(y) + y.sin()

    assert "conv (conv2d) is also read by sin" in left(
        Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    )


def test_a_producer_that_is_an_output() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        return bn(y), y

    assert "the model's output" in left(Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)))


def test_a_convolution_with_two_norms() -> None:
    def steps(x: Tensor, conv: nn.Module, one: nn.Module, two: nn.Module) -> Any:
        return one(conv(x)) + two(conv(-x))

    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), one=nn.BatchNorm2d(4), two=nn.BatchNorm2d(4))
    report = check_folds(model, image(), 0, 2)
    assert all("conv is called 2 times" in layer.reason for layer in report.left)


def test_the_same_pair_called_twice() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        return bn(conv(bn(conv(x))))

    model = Steps(steps, conv=nn.Conv2d(6, 6, 3, padding=1), bn=nn.BatchNorm2d(6))
    assert "conv is called 2 times" in left(model)


def test_a_shared_norm_whose_calls_agree_is_folded_into_both() -> None:
    def steps(x: Tensor, one: nn.Module, two: nn.Module, bn: nn.Module) -> Any:
        return bn(one(x)) + bn(two(x)).sin()

    model = Steps(steps, one=nn.Conv2d(6, 4, 3), two=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    check_folds(model, image())


def test_a_shared_norm_whose_calls_disagree_is_left() -> None:
    def steps(x: Tensor, one: nn.Module, bn: nn.Module) -> Any:
        return bn(one(x)) + bn(x).sin()

    model = Steps(steps, one=nn.Conv2d(6, 6, 3, padding=1), bn=nn.BatchNorm2d(6))
    assert "the model's input" in left(model)


def heads() -> Steps:
    def steps(x: Tensor, **layers: nn.Module) -> Any:
        one = layers["bn_1"](layers["conv_1"](x))
        return one + layers["bn_2"](layers["conv_2"](x * 2))

    conv = nn.Conv2d(6, 4, 3)
    return Steps(steps, conv_1=conv, bn_1=nn.BatchNorm2d(4), conv_2=conv, bn_2=nn.BatchNorm2d(4))


def test_a_module_under_two_names_can_be_cloned() -> None:
    check_folds(heads(), image(), 0, 2)
    model = heads()
    check_folds(model, image(), folded=2, clone_shared=True)
    assert model.conv_1 is not model.conv_2


def test_shared_weights_are_left() -> None:
    model = Steps(
        lambda x, one, two, bn: bn(one(x)) + two(x),
        one=nn.Conv2d(6, 4, 3),
        two=nn.Conv2d(6, 4, 3),
        bn=nn.BatchNorm2d(4),
    )
    model.two.weight = model.one.weight
    assert "is shared with another module" in left(model)


@pytest.mark.parametrize("where", ["conv", "bn", "body"])
def test_a_hook_that_sees_a_changed_value_is_honoured(where: str) -> None:
    body = nn.Sequential(nn.Conv2d(6, 4, 3))
    model = Steps(lambda x, body, bn: bn(body(x)), body=body, bn=nn.BatchNorm2d(4))
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output)

    {"conv": body[0], "bn": model.bn, "body": body}[where].register_forward_hook(look)
    assert "hook look" in left(model)


def test_a_hook_that_sees_nothing_of_it_does_not_block() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    check_folds(model, image())


def test_no_running_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert "no running statistics" in left(model)


def test_a_norm_that_is_not_called() -> None:
    model = Steps(lambda x, conv, bn: conv(x), conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    assert "does not call it" in left(model)


def test_a_norm_whose_forward_does_more() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
            return super().forward(input) * 2 + 1

    model = nn.Sequential(nn.Conv2d(6, 4, 3), Doubled(4))
    assert "does more than normalise: mul" in left(model)


def test_selection() -> None:
    model = nn.Sequential(*conv_bn(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
    assert "excluded by '1'" in left(model, folded=1, exclude="1")
    model = nn.Sequential(*conv_bn(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
    assert "not among the included" in left(model, folded=1, include=lambda name, _: name == "4")


def test_an_excluded_norm_takes_nothing_in() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.GELU())
    report = check_folds(model, image(), 0, 2, exclude="0")
    assert "0 must not change: it is excluded by '0'" in report.left[1].reason


def test_a_functional_norm_is_reported() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 4, 3)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.batch_norm(self.conv(x), self.mean, self.var)  # type: ignore[arg-type]

    report = plan_fold_batchnorm(nn.Sequential(Functional()).eval(), image()).report
    assert report.left[0].name == "0"
    assert "a function called by Functional" in report.left[0].reason


# -- activations in place -----------------------------------------------------------------------


def test_an_in_place_activation_does_not_write_into_a_residual() -> None:
    def steps(x: Tensor, bn: nn.Module, act: nn.Module, end: nn.Module) -> Any:
        y = x * 2
        return end(act(bn(y))) + y

    model = Steps(
        steps, bn=nn.BatchNorm2d(6), act=nn.LeakyReLU(inplace=True), end=nn.Conv2d(6, 6, 1)
    )
    assert "leaky_relu" in left(model)


def test_an_in_place_activation_does_not_write_into_a_split_view() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module, act: nn.Module) -> Any:
        one, two = conv(x).chunk(2, 1)
        return act(bn(one)) * two

    model = Steps(steps, conv=nn.Conv2d(6, 8, 3), bn=nn.BatchNorm2d(4), act=nn.SiLU(inplace=True))
    check_folds(model, image())
    assert model.act.inplace is False
    model(image().double()).sum().backward()


def test_an_in_place_function_on_a_split_view_blocks() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        one, two = conv(x).chunk(2, 1)
        return torch.relu_(bn(one)) * two

    model = Steps(steps, conv=nn.Conv2d(6, 8, 3), bn=nn.BatchNorm2d(4))
    assert "relu_" in left(model)


def test_a_producer_that_is_written_in_place_blocks() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        y[:, :2] += 1
        return bn(y)

    left(Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)))


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
