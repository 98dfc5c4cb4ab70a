"""Folding back into what produces a norm's input: one toy model per operation on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnconvert import fold_batchnorm, plan_fold_batchnorm
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import Steps, check_folds, image

if TYPE_CHECKING:
    from collections.abc import Callable


IMAGE = (2, 6, 8, 8)


LINEAR_LAYERS = {
    "conv1d": (nn.Conv1d(6, 4, 3, padding=1), nn.BatchNorm1d(4), (2, 6, 9)),
    "conv2d": (nn.Conv2d(6, 4, 3, stride=2), nn.BatchNorm2d(4), IMAGE),
    "conv2d without bias": (nn.Conv2d(6, 4, 3, bias=False), nn.BatchNorm2d(4), IMAGE),
    "conv2d same": (nn.Conv2d(6, 4, 3, padding="same"), nn.BatchNorm2d(4), IMAGE),
    "conv3d": (nn.Conv3d(6, 4, 3), nn.BatchNorm3d(4), (2, 6, 5, 5, 5)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4), IMAGE),
    "depthwise": (nn.Conv2d(6, 12, 3, groups=6), nn.BatchNorm2d(12), IMAGE),
    "transposed 1d": (nn.ConvTranspose1d(6, 4, 3, stride=2), nn.BatchNorm1d(4), (2, 6, 9)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2), nn.BatchNorm2d(4), IMAGE),
    "transposed grouped": (
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False),
        nn.BatchNorm2d(4),
        IMAGE,
    ),
    "transposed 3d": (
        nn.ConvTranspose3d(6, 9, 2, groups=3),
        nn.BatchNorm3d(9),
        (2, 6, 4, 4, 4),
    ),
    "linear": (nn.Linear(6, 4), nn.BatchNorm1d(4), (5, 6)),
    "linear without bias": (nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), (5, 6)),
    "eps": (nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, eps=1e-3), IMAGE),
    "no affine": (nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, affine=False), IMAGE),
    "padding reflect": (
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        IMAGE,
    ),
    "one channel": (nn.Conv2d(6, 1, 3), nn.BatchNorm2d(1), IMAGE),
}


@pytest.mark.parametrize("kind", LINEAR_LAYERS)
def test_a_norm_goes_into_the_layer_before_it(kind: str) -> None:
    layer, norm, shape = LINEAR_LAYERS[kind]
    check_folds(nn.Sequential(layer, norm), torch.randn(shape))


def test_a_norm_without_bias_is_folded() -> None:
    norm = nn.BatchNorm2d(4)
    norm.register_parameter("bias", None)
    check_folds(nn.Sequential(nn.Conv2d(6, 4, 3), norm), image())


THROUGH: dict[str, tuple[Callable[..., Any], int]] = {
    "dropout": (lambda x, conv, bn: bn(F.dropout(conv(x), 0.3, training=False)), 12),
    "flatten": (lambda x, conv, bn: bn(conv(x).flatten(2)), 12),
    "reshape": (lambda x, conv, bn: bn(conv(x).reshape(x.shape[0], 12, 4, 16)), 12),
    "permute and back": (
        lambda x, conv, bn: bn(conv(x).permute(0, 2, 3, 1).permute(0, 3, 1, 2)),
        12,
    ),
    "transpose": (lambda x, conv, bn: bn(conv(x).transpose(2, 3)), 12),
    "tokens": (lambda x, conv, bn: bn(conv(x).flatten(2).transpose(1, 2).flatten(0, 1)), 12),
    "channel shuffle": (
        lambda x, conv, bn: bn(conv(x).unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2)),
        12,
    ),
    "channel_shuffle": (lambda x, conv, bn: bn(F.channel_shuffle(conv(x), 3)), 12),
    "pixel shuffle": (lambda x, conv, bn: bn(F.pixel_shuffle(conv(x), 2)), 3),
    "roll": (lambda x, conv, bn: bn(torch.roll(conv(x), (1, 2), (2, 3))), 12),
    "flip channels": (lambda x, conv, bn: bn(conv(x).flip(1)), 12),
    "average pooling": (lambda x, conv, bn: bn(F.avg_pool2d(conv(x), 2)), 12),
    "average pooling, padding not counted": (
        lambda x, conv, bn: bn(F.avg_pool2d(conv(x), 3, 2, 1, count_include_pad=False)),
        12,
    ),
    "average pooling, ceil": (
        lambda x, conv, bn: bn(F.avg_pool2d(conv(x), 3, 2, ceil_mode=True)),
        12,
    ),
    "adaptive pooling": (lambda x, conv, bn: bn(F.adaptive_avg_pool2d(conv(x), 3)), 12),
    "global pooling": (lambda x, conv, bn: bn(F.adaptive_avg_pool2d(conv(x), 1).flatten(1)), 12),
    "mean": (lambda x, conv, bn: bn(conv(x).mean((2, 3))), 12),
    "mean, dims kept": (lambda x, conv, bn: bn(conv(x).mean((2, 3), keepdim=True)), 12),
    "nearest": (lambda x, conv, bn: bn(F.interpolate(conv(x), scale_factor=2.0)), 12),
    "bilinear": (
        lambda x, conv, bn: bn(
            F.interpolate(conv(x), size=13, mode="bilinear", align_corners=False)
        ),
        12,
    ),
    "bicubic": (
        lambda x, conv, bn: bn(F.interpolate(conv(x), size=13, mode="bicubic", antialias=True)),
        12,
    ),
    "reflect padding": (lambda x, conv, bn: bn(F.pad(conv(x), (1, 2, 1, 0), mode="reflect")), 12),
    "circular padding": (lambda x, conv, bn: bn(F.pad(conv(x), (1, 2, 1, 0), mode="circular")), 12),
    "slice": (lambda x, conv, bn: bn(conv(x)[:, 2:9]), 7),
    "one chunk": (lambda x, conv, bn: bn(conv(x).chunk(3, 1)[1]), 4),
    "uneven split, other part read": (
        lambda x, conv, bn: torch.cat(
            [bn(conv(x).split([5, 7], 1)[1]), conv.bias.new_ones(x.shape[0], 1, 8, 8)], 1
        ),
        7,
    ),
    "cat of its parts": (
        lambda x, conv, bn: bn(torch.cat(conv(x).split([5, 7], 1)[::-1], 1)),
        12,
    ),
    "index": (lambda x, conv, bn: bn(conv(x)[:, torch.tensor([3, 1, 0])]), 3),
    "shape is read": (
        lambda x, conv, bn: (y := conv(x)) is None or bn(y.flatten(2)).reshape_as(y),
        12,
    ),
}


@pytest.mark.parametrize("operation", THROUGH)
def test_a_norm_goes_back_through(operation: str) -> None:
    steps, channels = THROUGH[operation]
    norm = nn.BatchNorm2d(channels)
    norm._check_input_dim = lambda _: None  # type: ignore[method-assign, assignment]
    check_folds(Steps(steps, conv=nn.Conv2d(6, 12, 3, padding=1), bn=norm), image())


def test_both_parts_of_a_split_can_have_a_norm() -> None:
    def steps(x: Tensor, conv: nn.Module, one: nn.Module, two: nn.Module) -> Any:
        first, second = conv(x).chunk(2, 1)
        return one(first) * two(second)

    model = Steps(steps, conv=nn.Conv2d(6, 8, 3), one=nn.BatchNorm2d(4), two=nn.BatchNorm2d(4))
    check_folds(model, image(), folded=2)


def test_a_part_that_others_read_is_left_alone() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        return bn(y[:, :4]) * y[:, 4:]

    check_folds(Steps(steps, conv=nn.Conv2d(6, 8, 3), bn=nn.BatchNorm2d(4)), image())


def test_overlapping_parts_block() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        return bn(y[:, :5]) * y[:, 3:]

    check_folds(Steps(steps, conv=nn.Conv2d(6, 8, 3), bn=nn.BatchNorm2d(5)), image(), 0, 1)


MAXIMA: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d, padded": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d, indices dropped": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "max_pool2d, indices read": lambda x: torch.add(*F.max_pool2d(x, 2, return_indices=True)),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, 3),
    "adaptive 1d": lambda x: F.adaptive_max_pool1d(x.flatten(2), 1),
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "max": lambda x: x.max(3).values,
}


@pytest.mark.parametrize("kind", sorted(set(MAXIMA) - {"max_pool2d, indices read"}))
def test_maxima_let_positive_scales_through_and_stop_negative_ones(kind: str) -> None:
    pool = MAXIMA[kind]

    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        return bn(pool(conv(x)))

    norm = nn.BatchNorm1d(4) if "1d" in kind or kind == "max" else nn.BatchNorm2d(4)
    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=norm).double().eval()
    randomize_batchnorm(model)
    x = image().double()
    reason = plan_fold_batchnorm(model, x).report.left[0].reason
    assert "scale is negative in channel" in reason
    assert "takes the maximum" in reason
    with torch.no_grad():
        norm.weight.abs_()
        expected = model(x)
        fold_batchnorm(model, x)
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert type(model.bn) is nn.Identity


@pytest.mark.parametrize("kind", MAXIMA)
def test_a_norm_goes_forward_through_maxima(kind: str) -> None:
    pool = MAXIMA[kind]

    def steps(x: Tensor, bn: nn.Module, fc: nn.Module) -> Any:
        return fc(pool(bn(x)).flatten(2).mean(2))

    norm = nn.BatchNorm2d(6)
    model = Steps(steps, bn=norm, fc=nn.Linear(6, 3)).double().eval()
    randomize_batchnorm(model)
    x = image().double()
    assert "takes the maximum" in plan_fold_batchnorm(model, x).report.left[0].reason
    with torch.no_grad():
        norm.weight.abs_()
        expected = model(x)
        fold_batchnorm(model, x)
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert (type(model.bn) is nn.Identity) == (kind != "max_pool2d, indices read")


@pytest.mark.parametrize("back", [True, False])
def test_a_scale_of_zero_would_move_the_place_of_a_maximum(back: bool) -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x) if back else bn(x)
        y, places = F.max_pool2d(y, 2, return_indices=True)
        return bn(y) if back else conv(y), places

    norm = nn.BatchNorm2d(4 if back else 6)
    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=norm).double().eval()
    randomize_batchnorm(model)
    with torch.no_grad():
        norm.weight.abs_()[1] = 0.0
    reason = plan_fold_batchnorm(model, image().double()).report.left[0].reason
    assert "a scale is 0, and" in reason
    assert "also gives the maximum's place" in reason


def test_concatenated_producers_each_take_their_part() -> None:
    def steps(x: Tensor, one: nn.Module, two: nn.Module, bn: nn.Module) -> Any:
        return bn(torch.cat([one(x), two(x)], 1))

    model = Steps(
        steps, one=nn.Conv2d(6, 3, 3), two=nn.Conv2d(6, 5, 3, bias=False), bn=nn.BatchNorm2d(8)
    )
    check_folds(model, image())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_takes_the_shift_once(sign: int) -> None:
    def steps(x: Tensor, one: nn.Module, two: nn.Module, bn: nn.Module) -> Any:
        return bn(one(x) + two(x)) if sign > 0 else bn(one(x) - two(x))

    model = Steps(steps, one=nn.Conv2d(6, 4, 3), two=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    check_folds(model, image())


def test_a_sum_of_a_tensor_with_itself_is_left() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        return bn(y + y)

    check_folds(Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)), image(), 0, 1)


def test_a_chain_of_norms_composes_into_the_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, eps=1e-3))
    check_folds(model, image(), folded=2)


def test_a_chain_of_norms_composes_into_the_first_when_nothing_else_takes_it() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(6), nn.Dropout2d(), nn.BatchNorm2d(6, affine=False), nn.GELU()
    )
    check_folds(model, image(), folded=1, left=1)


@pytest.mark.parametrize("edges", [0, (-1, 0, 0, -2)])
def test_padding_that_adds_nothing_lets_a_map_through(edges: Any) -> None:
    pad = nn.ZeroPad2d(edges)
    check_folds(nn.Sequential(nn.Conv2d(6, 4, 3), pad, nn.BatchNorm2d(4)), image())
    check_folds(nn.Sequential(nn.BatchNorm2d(6), pad, nn.Conv2d(6, 4, 3)), image())


def test_counted_padding_and_own_divisors_block() -> None:
    for pool in (nn.AvgPool2d(3, padding=1), nn.AvgPool2d(2, divisor_override=3)):
        model = nn.Sequential(nn.Conv2d(6, 4, 3), pool, nn.BatchNorm2d(4), nn.GELU())
        check_folds(model, image(), 0, 1)


def test_nothing_goes_back_across_relu() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.GELU()).eval()
    randomize_batchnorm(model)
    reason = plan_fold_batchnorm(model, image()).report.left[0].reason
    assert "1 (relu)" in reason
