"""Folding models whose code does more with inputs, layers and sizes than calling one by one."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnconvert import BnconvertError, fold_batchnorm, fold_exported, plan_fold_batchnorm
from bnconvert.fold.exported import plan_fold_exported
from bnconvert.report import Outcome
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import Steps, conv_bn, image

if TYPE_CHECKING:
    from collections.abc import Callable

OTHER_SIZES = [(2, 6, 8, 8), (5, 6, 8, 8), (2, 6, 16, 16)]


def model_of(steps: Callable[..., Any]) -> Any:
    layers = {"conv": nn.Conv2d(6, 4, 3, padding=1), "bn": nn.BatchNorm2d(4)}
    model = Steps(steps, **layers, bn1=nn.BatchNorm1d(4)).eval()
    randomize_batchnorm(model)
    return model


def fold_and_compare(model: Any, name: str = "bn") -> Any:
    """Fold, compare at other batch and image sizes, and return the entry of the norm."""
    inputs = [torch.randn(size) for size in OTHER_SIZES]
    with torch.no_grad():
        expected = [model(x.clone()) for x in inputs]
    plan = plan_fold_batchnorm(model, image())
    plan.apply()
    with torch.no_grad():
        for x, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x.clone()), wanted, rtol=1e-4, atol=1e-5)
    return next(layer for layer in plan.report.layers if layer.name == name)


SIZES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "divided by the batch size": ("bn", lambda x, conv, bn, bn1: bn(conv(x) / x.shape[0])),
    "batch size added": ("bn", lambda x, conv, bn, bn1: bn(conv(x) + x.shape[0])),
    "tensor of the batch size": (
        "bn",
        lambda x, conv, bn, bn1: bn(conv(x) * torch.full((1, 4, 1, 1), float(x.shape[0]))),
    ),
    "times the image size": (
        "bn1",
        lambda x, conv, bn, bn1: bn1(conv(x).mean((2, 3)) * (x.shape[2] * x.shape[3])),
    ),
}


@pytest.mark.parametrize("kind", SIZES)
def test_a_number_that_was_a_size_is_no_constant(kind: str) -> None:
    name, steps = SIZES[kind]
    assert fold_and_compare(model_of(steps), name).outcome is Outcome.LEFT


def test_a_number_of_the_code_is_a_constant() -> None:
    model = model_of(lambda x, conv, bn, bn1: bn(conv(x) / 2))
    assert fold_and_compare(model).outcome is Outcome.FOLDED


READS: dict[str, tuple[str, Callable[..., Any]]] = {
    "dtype of a weight": (
        "the forward reads its weight",
        lambda x, conv, bn, bn1: bn(conv(x)).to(bn.weight.dtype),
    ),
    "number of channels": (
        "the forward reads its num_features",
        lambda x, conv, bn, bn1: bn(conv(x)).unflatten(1, (bn.num_features, 1)),
    ),
    "weight of the norm": (
        "a tensor of it is also read by abs",
        lambda x, conv, bn, bn1: (bn(conv(x)), bn.weight.abs().sum()),
    ),
    "weight of the convolution": (
        "a weight of conv is also read by pow",
        lambda x, conv, bn, bn1: (bn(conv(x)), conv.weight.pow(2).sum()),
    ),
    "convolution as a function": (
        "a weight of conv is also read by conv2d",
        lambda x, conv, bn, bn1: bn(conv(x)) + F.conv2d(x, conv.weight, padding=1),
    ),
}


@pytest.mark.parametrize("kind", READS)
def test_what_the_forward_reads_itself_is_left(kind: str) -> None:
    reason, steps = READS[kind]
    entry = fold_and_compare(model_of(steps))
    assert entry.outcome is Outcome.LEFT
    assert reason in entry.reason


def test_a_norm_whose_weight_another_one_uses_takes_nothing_in() -> None:
    def steps(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Tensor:
        return F.gelu(second(first(F.gelu(x)))) + F.gelu(third(F.gelu(x)))

    model: Any = Steps(steps, **{n: nn.BatchNorm2d(6) for n in ("first", "second", "third")})
    randomize_batchnorm(model)
    model.third.weight = model.first.weight
    assert fold_and_compare(model.eval(), "second").outcome is Outcome.LEFT


@pytest.mark.parametrize("change", [lambda x: x.sub_(0.5), lambda x: F.silu(x, inplace=True)])
def test_a_forward_that_writes_into_its_input(change: Callable[[Tensor], Tensor]) -> None:
    model, x = model_of(lambda x, conv, bn, bn1: bn(conv(change(x)))), image()
    assert fold_and_compare(model).outcome is Outcome.FOLDED
    model = model_of(lambda x, conv, bn, bn1: bn(conv(change(x))))
    fold_batchnorm(model, x)
    assert torch.equal(x, image())


class Counting(nn.Module):
    """Counts its calls in a buffer that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return self.bn(self.conv(x)) + self.calls  # type: ignore[no-any-return]


def test_a_counter_stands_where_it_stood() -> None:
    model = Counting().eval()
    randomize_batchnorm(model)
    fold_batchnorm(model, image())
    assert isinstance(model.bn, nn.Identity)
    assert model.calls == 0
    program = torch.export.export(Counting().eval(), (image(),))
    folded = fold_exported(program)
    assert program.state_dict["calls"] == folded.state_dict["calls"] == 0


def test_folding_in_inference_mode_leaves_weights_that_train() -> None:
    model = conv_bn()
    with torch.inference_mode():
        fold_batchnorm(model, image())
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(image()).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def test_models_without_values_to_change_are_refused() -> None:
    with torch.inference_mode():
        made = conv_bn()
    with torch.device("meta"):
        empty = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)).eval()
    for model, reason in ((made, "inference_mode"), (empty, "meta device")):
        with pytest.raises(BnconvertError, match=f"fold: 0.weight .*{reason}"):
            fold_batchnorm(model, image())


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_program_of_a_training_model_keeps_its_norms(decomposed: bool) -> None:
    program = torch.export.export(conv_bn().train(), (image(),))
    report = plan_fold_exported(program.run_decompositions() if decomposed else program).report
    assert [layer.outcome for layer in report.layers] == [Outcome.LEFT]
    assert "captured in training mode" in report.layers[0].reason


def test_a_part_that_is_compiled_on_its_own() -> None:
    compiled: Any = torch.compile(conv_bn())
    model = nn.Sequential(compiled, nn.Conv2d(4, 2, 1)).eval()
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        expected = model(image())
        report = plan_fold_batchnorm(model, image()).report
        fold_batchnorm(model, image())
        torch.testing.assert_close(model(image()), expected, rtol=1e-4, atol=1e-5)
    assert report.count(Outcome.FOLDED) == 1
    assert type(model[0]).__name__ == "OptimizedModule"


def test_a_program_with_branches_folds_around_them() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = bn(conv(x))
        return torch.cond(y.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,))

    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)).eval()
    randomize_batchnorm(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch looks at gradients of values in branches
        program = torch.export.export(model, (image(),))
    plan = plan_fold_exported(program)
    assert plan.report.count(Outcome.FOLDED) == 1
    with torch.no_grad():
        torch.testing.assert_close(plan.apply().module()(image()), model(image()))
