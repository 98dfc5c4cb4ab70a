"""Folding on into everything that reads a norm's result, and across activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnconvert import fold_batchnorm, plan_fold_batchnorm
from bnconvert.fold.clamp import ChannelClamp
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import Steps, check_folds, image

if TYPE_CHECKING:
    from collections.abc import Callable

READERS = {
    "1x1": nn.Conv2d(6, 4, 1),
    "3x3 without padding": nn.Conv2d(6, 4, 3, bias=False),
    "grouped": nn.Conv2d(6, 4, 3, groups=2),
    "depthwise": nn.Conv2d(6, 12, 3, groups=6),
    "reflect": nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
    "replicate": nn.Conv2d(6, 4, 3, padding=1, padding_mode="replicate"),
    "circular": nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular", groups=3),
    "valid": nn.Conv2d(6, 4, 3, padding="valid"),
    "transposed 1x1": nn.ConvTranspose2d(6, 4, 1, groups=2),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_norm_goes_into_the_convolution_after_it(kind: str) -> None:
    check_folds(nn.Sequential(nn.BatchNorm2d(6), READERS[kind]), image())


@pytest.mark.parametrize(
    "reader",
    [
        nn.Conv2d(6, 4, 3, padding=1),
        nn.Conv2d(6, 4, 3, padding="same"),
        nn.ConvTranspose2d(6, 4, 2),
        nn.ConvTranspose2d(6, 4, 1, stride=2),
        nn.ConvTranspose2d(6, 4, 1, padding=1),
    ],
)
def test_a_reader_that_sees_padding_zeros_blocks(reader: nn.Module) -> None:
    check_folds(nn.Sequential(nn.BatchNorm2d(6), reader), image(), 0, 1)


def test_a_norm_goes_into_a_linear_layer() -> None:
    check_folds(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), torch.randn(5, 6))


ON: dict[str, Callable[..., Tensor]] = {
    "flatten": lambda x, bn, conv, fc: fc(F.adaptive_avg_pool2d(bn(x), 1).flatten(1)),
    "mean": lambda x, bn, conv, fc: fc(bn(x).mean((2, 3))),
    "tokens": lambda x, bn, conv, fc: fc(bn(x).flatten(2).transpose(1, 2)),
    "permute": lambda x, bn, conv, fc: fc(bn(x).permute(0, 2, 3, 1)),
    "dropout": lambda x, bn, conv, fc: conv(F.dropout2d(bn(x), 0.1, training=False)),
    "pooling": lambda x, bn, conv, fc: conv(F.avg_pool2d(bn(x), 2)),
    "cat": lambda x, bn, conv, fc: conv(torch.cat([x[:, :2], bn(x)[:, 2:]], 1)),
    "upsampling": lambda x, bn, conv, fc: conv(F.interpolate(bn(x), scale_factor=2.0)),
    "two readers": lambda x, bn, conv, fc: conv(y := bn(x)).sum() + fc(y.mean((2, 3))),
    "split and joined": lambda x, bn, conv, fc: conv(torch.cat(bn(x).split([1, 5], 1)[::-1], 1)),
    "diamond": lambda x, bn, conv, fc: conv(
        torch.cat([(y := bn(x)).roll(1, 2)[:, :3], y.roll(1, 3)[:, 3:]], 1)
    ),
}


@pytest.mark.parametrize("way", ON)
def test_a_norm_goes_on_through(way: str) -> None:
    model = Steps(ON[way], bn=nn.BatchNorm2d(6), conv=nn.Conv2d(6, 4, 1), fc=nn.Linear(6, 3))
    check_folds(model, image())


def test_flatten_spreads_a_channel_over_several_features() -> None:
    def steps(x: Tensor, bn: nn.Module, fc: nn.Module) -> Any:
        return fc(bn(x).flatten(1))

    check_folds(Steps(steps, bn=nn.BatchNorm2d(6), fc=nn.Linear(6 * 64, 3)), image())


@pytest.mark.parametrize("barred", ["output", "sum", "gelu"])
def test_all_readers_or_none(barred: str) -> None:
    def steps(x: Tensor, bn: nn.Module, conv: nn.Module) -> Any:
        y = bn(x)
        if barred == "output":
            return conv(y), y
        return conv(y).sum() + (y + x if barred == "sum" else F.gelu(y))

    check_folds(Steps(steps, bn=nn.BatchNorm2d(6), conv=nn.Conv2d(6, 4, 1)), image(), 0, 1)


def test_norms_that_follow_each_other_go_into_one_reader() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.Conv2d(6, 4, 1))
    check_folds(model, image(), folded=2)


def test_a_convolution_takes_norms_in_from_both_sides() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))
    check_folds(model, image(), folded=2)


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(inplace=True),
    "hardtanh": nn.Hardtanh(-0.7, 1.3),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_norm_goes_across_an_activation_with_any_sign(kind: str) -> None:
    def steps(x: Tensor, bn: nn.Module, act: nn.Module, conv: nn.Module) -> Any:
        return conv(act(bn(x))) + x.mean()

    model = Steps(steps, bn=nn.BatchNorm2d(6), act=ACTIVATIONS[kind], conv=nn.Conv2d(6, 4, 1))
    check_folds(model, image())
    assert type(model.act) is ChannelClamp
    assert type(model.bn) is nn.Identity


def test_activations_are_kept_when_asked() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))
    report = check_folds(model, image(), 0, 1, rewrite_activations=False)
    assert "activations are not rewritten" in report.left[0].reason


def test_a_clamp_works_on_tokens() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 5, 3))
    check_folds(model, torch.randn(4, 6, 5))


def test_an_activation_that_is_called_twice_stays() -> None:
    def steps(x: Tensor, bn: nn.Module, act: nn.Module, conv: nn.Module) -> Any:
        return act(conv(act(bn(x))))

    model = Steps(steps, bn=nn.BatchNorm2d(6), act=nn.ReLU(), conv=nn.Conv2d(6, 4, 1))
    assert "act is called 2 times" in check_folds(model, image(), 0, 1).left[0].reason


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.1), nn.PReLU(6), nn.ReLU()])
def test_scale_and_shift_go_apart_around_a_positively_homogeneous_activation(
    activation: nn.Module,
) -> None:
    """The sum's other term cannot take a scale, and the reader's zero padding no shift."""

    def steps(x: Tensor, conv: nn.Module, bn: nn.Module, act: nn.Module, end: nn.Module) -> Any:
        return end(act(bn(conv(x) + x)))

    model = Steps(
        steps,
        conv=nn.Conv2d(6, 6, 3, padding=1),
        bn=nn.BatchNorm2d(6),
        act=activation,
        end=nn.Conv2d(6, 4, 3, padding=1),
    )
    model.eval()
    randomize_batchnorm(model)
    with torch.no_grad():
        model.bn.weight.abs_().add_(0.1)
        x = image()
        expected = model.double()(x.double())
        report = plan_fold_batchnorm(model, x.double()).report
        assert not report.left, str(report)
        fold_batchnorm(model, x.double())
        torch.testing.assert_close(model(x.double()), expected, rtol=1e-12, atol=1e-12)


def test_extreme_channels_are_clamped_right() -> None:
    """Scales so small that the bounds leave the dtype make constant channels."""
    model = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    bn: Any = model[0]
    with torch.no_grad():
        bn.weight.copy_(torch.tensor([1e-38, 1e-38, -1e-38, -1e-38, 1.0, 0.0]))
        bn.bias.copy_(torch.tensor([5.0, -5.0, 5.0, -5.0, 0.0, 2.0]))
        x = image()
        expected = model(x)
        fold_batchnorm(model, x)
        torch.testing.assert_close(model(x), expected)
