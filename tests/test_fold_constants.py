"""Folding through products and sums with constants: layer scales, offsets, low-rank adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnconvert import plan_fold_batchnorm
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import Steps, check_folds, image

if TYPE_CHECKING:
    from collections.abc import Callable

CONSTANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "number": lambda y, g: y * -1.5,
    "number first": lambda y, g: 0.25 * y,
    "quotient": lambda y, g: y / 3,
    "negative": lambda y, g: -y,
    "sum": lambda y, g: y + 1.5,
    "sum with a factor": lambda y, g: torch.add(y, g, alpha=-2),
    "factor on the value": lambda y, g: torch.add(g, y, alpha=3),
    "difference": lambda y, g: y - g,
    "difference with a factor": lambda y, g: torch.sub(y, g, alpha=0.5),
    "taken from a constant": lambda y, g: torch.sub(g, y, alpha=2),
    "taken from a number": lambda y, g: 1 - y,
    "rsub": lambda y, g: torch.rsub(y, 2, alpha=3),
    "layer scale": lambda y, g: y * g,
    "quotient by channel": lambda y, g: y / (g.abs() + 0.5),
    "several": lambda y, g: (y * g + 1) * 2 - g,
    "in place": lambda y, g: y.clone().mul_(g).add_(1),
}


class Constant(nn.Module):
    """Computes with its input and a parameter of one value per channel."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.gamma = nn.Parameter(torch.tensor([0.7, -1.3, 1e-6, 2.0]).view(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.gamma)


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_map_goes_back_through_constants(kind: str) -> None:
    check_folds(
        nn.Sequential(nn.Conv2d(6, 4, 3), Constant(CONSTANTS[kind]), nn.BatchNorm2d(4)), image()
    )


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_map_goes_on_through_constants(kind: str) -> None:
    check_folds(
        nn.Sequential(
            nn.Conv2d(6, 4, 3),
            nn.ELU(),
            nn.BatchNorm2d(4),
            Constant(CONSTANTS[kind]),
            nn.Conv2d(4, 3, 1),
        ),
        image(),
    )


def test_a_factor_of_zero_lets_a_map_on_but_not_back() -> None:
    zero = Constant(lambda y, g: y * 0.0)
    back = check_folds(nn.Sequential(nn.Conv2d(6, 4, 3), zero, nn.BatchNorm2d(4)), image(), 0, 1)
    assert "multiplies channel 0 by 0" in back.left[0].reason
    check_folds(nn.Sequential(nn.Sigmoid(), nn.BatchNorm2d(6), zero, nn.Conv2d(6, 3, 1)), image())


NOT_CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda y: y * y,
    "reciprocal": lambda y: 2.0 / (y.abs() + 1.0),
    "rounded quotient": lambda y: torch.div(y, 0.1, rounding_mode="floor"),
    "position": lambda y: y * torch.linspace(0.5, 2.0, y.shape[-1], dtype=y.dtype),
    "by zero": lambda y: torch.nan_to_num(y / 0.0),
    "wider": lambda y: (y[:, :, :1] + torch.ones(6, 1, dtype=y.dtype))[:, :, :1],
    "another value": lambda y: y + y.mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("kind", NOT_CONSTANT)
def test_what_is_no_map_by_channel_blocks(kind: str) -> None:
    middle = NOT_CONSTANT[kind]
    steps = Steps(
        lambda x, conv, bn, end: end(middle(bn(F.elu(middle(conv(x)))))),
        conv=nn.Conv2d(6, 4, 3),
        bn=nn.BatchNorm2d(4),
        end=nn.Conv2d(4, 3, 1),
    ).eval()
    randomize_batchnorm(steps)
    report = plan_fold_batchnorm(steps, image()).report
    assert len(report.left) == 1
    if kind == "position":
        assert "differ within a channel" in report.left[0].reason


def test_constants_are_followed_to_the_channels_that_moved() -> None:
    def steps(x: Tensor, conv: Any, bn: Any, fc: Any) -> Any:
        y = conv(x).flatten(2).transpose(1, 2)  # (batch, places, channels)
        y = y * torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=y.dtype)
        return bn(y.transpose(1, 2))

    layers = {"conv": nn.Conv2d(6, 4, 3), "bn": nn.BatchNorm1d(4), "fc": nn.Identity()}
    check_folds(Steps(steps, **layers), image())


def test_a_low_rank_adapter_and_its_base_take_the_norm() -> None:
    """As PEFT writes them: `base(x) + b(a(x)) * scaling`."""
    check_folds(
        Steps(
            lambda x, base, a, b, bn: bn(base(x) + b(a(x)) * 0.5),
            base=nn.Conv2d(6, 4, 3, bias=False),
            a=nn.Conv2d(6, 2, 3, bias=False),
            b=nn.Conv2d(2, 4, 1, bias=False),
            bn=nn.BatchNorm2d(4),
        ),
        image(),
    )
