"""The algebra against torch's own operations, on random values of both signs with zeros."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bnconvert import BnconvertError
from bnconvert.fold.algebra import (
    Affine,
    Layout,
    absorb_after,
    absorb_before,
    batchnorm_affine,
    cast,
    swap_with_limits,
)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def affine(channels: int, seed: int = 5) -> Affine:
    scale = values(channels, seed=seed)
    scale[::3] = 0
    return Affine(scale, values(channels, seed=seed + 1))


def apply(x: Tensor, map_: Affine) -> Tensor:
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return x * map_.scale.reshape(shape) + map_.shift.reshape(shape)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_convolution(groups: int, with_bias: bool) -> None:
    x, weight = values(2, 6, 7, 7), values(12, 6 // groups, 3, 3, seed=1)
    bias = values(12, seed=2) if with_bias else None
    layout = Layout(groups=groups)
    new = absorb_after(weight, bias, affine(12), layout)
    wanted = apply(F.conv2d(x, weight, bias, groups=groups), affine(12))
    torch.testing.assert_close(F.conv2d(x, *new, groups=groups), wanted)
    new = absorb_before(weight, bias, affine(6), layout)
    wanted = F.conv2d(apply(x, affine(6)), weight, bias, groups=groups)
    torch.testing.assert_close(F.conv2d(x, *new, groups=groups), wanted)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_transposed_convolution(groups: int) -> None:
    x, weight = values(2, 6, 5, 5), values(6, 12 // groups, 3, 3, seed=1)
    layout = Layout(transposed=True, groups=groups)
    assert layout.channels(weight) == (12, 6)
    new = absorb_after(weight, None, affine(12), layout)
    wanted = apply(F.conv_transpose2d(x, weight, None, 2, groups=groups), affine(12))
    torch.testing.assert_close(F.conv_transpose2d(x, *new, 2, groups=groups), wanted)
    scaled, moved = absorb_before(weight, None, affine(6).scale_only, layout)
    assert not moved.any()
    wanted = F.conv_transpose2d(apply(x, affine(6).scale_only), weight, None, 2, groups=groups)
    torch.testing.assert_close(F.conv_transpose2d(x, scaled, None, 2, groups=groups), wanted)


def test_linear_and_matrix_product() -> None:
    x, weight, bias = values(4, 6), values(3, 6, seed=1), values(3, seed=2)
    wanted = F.linear(apply(x, affine(6)), weight, bias)
    torch.testing.assert_close(
        F.linear(x, *absorb_before(weight, bias, affine(6), Layout())), wanted
    )
    matrix, shift = absorb_before(weight.T, bias, affine(6), Layout(transposed=True))
    torch.testing.assert_close(x @ matrix + shift, wanted)
    matrix, shift = absorb_after(weight.T, bias, affine(3), Layout(transposed=True))
    torch.testing.assert_close(x @ matrix + shift, apply(F.linear(x, weight, bias), affine(3)))


def test_batchnorm_with_and_without_parts() -> None:
    x, mean, var = values(5, 4), values(4, seed=1), values(4, seed=2).exp()
    for weight, bias in ((values(4, seed=3), values(4, seed=4)), (None, None)):
        wanted = F.batch_norm(x, mean, var, weight, bias, eps=1e-3)
        torch.testing.assert_close(
            apply(x, batchnorm_affine(mean, var, 1e-3, weight, bias)), wanted
        )


def test_composition() -> None:
    x = values(3, 4)
    wanted = apply(apply(x, affine(4)), affine(4, seed=9))
    torch.testing.assert_close(apply(x, affine(4).then(affine(4, seed=9))), wanted)


numbers = st.floats(-1e3, 1e3, allow_subnormal=False)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([0.0, 1.0, -1.0, 1e-30, -1e-30]) | numbers,
    numbers,
    st.lists(numbers, min_size=1, max_size=8),
    st.sampled_from([(0.0, math.inf), (0.0, 6.0), (-1.0, 1.0), (-math.inf, 2.0)]),
)
def test_limits_after_a_map_equal_a_clamp_before_another(
    scale: float, shift: float, inputs: list[float], limits: tuple[float, float]
) -> None:
    x = torch.tensor(inputs, dtype=torch.float64)
    map_ = Affine(torch.tensor([scale]).double(), torch.tensor([shift]).double())
    wanted = (x * map_.scale + map_.shift).clamp(*limits)
    swapped = swap_with_limits(map_, *limits, torch.float32)
    got = x.clamp(swapped.lower, swapped.upper) * swapped.outer.scale + swapped.outer.shift
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-9)


def test_casting_refuses_what_does_not_fit() -> None:
    with pytest.raises(BnconvertError, match="bn: channel 1 has the value 70000, which overflows"):
        cast(torch.tensor([1.0, 7e4]).double(), torch.float16, "bn")
    with pytest.raises(BnconvertError, match="channel 0 has the value nan, which is not finite"):
        cast(torch.tensor([math.nan]).double(), torch.float32, "bn")
