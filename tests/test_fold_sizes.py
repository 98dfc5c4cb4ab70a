"""Forwards that take another path for inputs of another size than the example's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnconvert import plan_fold_batchnorm
from bnconvert.fold import batchnorm
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from collections.abc import Callable


class ByBatch(nn.Module):
    """Reads the layer before the norm in large batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.bn, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.other(x))
        y: Tensor = self.last(self.bn(h))
        return y + h if x.shape[0] > 4 else y


class PadsOdd(nn.Module):
    """Pads with zeros what the convolution after the norm cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.bn, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        height, width = x.shape[-2:]
        if height % 2 or width % 2:
            x = F.pad(x, (0, width % 2, 0, height % 2))
        y: Tensor = self.conv(x)
        return y


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "batch": (ByBatch, (2, 4), (5, 4)),
    "image": (PadsOdd, (2, 4, 8, 8), (2, 4, 7, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_another_size_would_read_is_left_and_the_rest_folds(case: str) -> None:
    build, own, other = CASES[case]
    torch.manual_seed(0)
    model = build().double().eval()
    randomize_batchnorm(model)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in (own, other)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    plan = plan_fold_batchnorm(model, inputs[0])
    (left,) = plan.report.left
    assert (left.name, left.reason) == (
        "bn",
        "the forward reads something else where inputs have another size",
    )
    plan.apply()
    with torch.no_grad():
        for x, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x), wanted, rtol=1e-11, atol=1e-11)


def test_where_the_norms_are_too_many_to_look_for_all_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batchnorm, "_MOST_FOUND", 0)
    model = PadsOdd().eval()
    randomize_batchnorm(model)
    report = plan_fold_batchnorm(model, torch.randn(2, 4, 8, 8)).report
    assert len(report.left) == len(report.layers) == 2


class FailsAlone(nn.Module):
    """Takes another way for single images, on which the folded model would not run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        if x.shape[0] > 1:
            return self.bn(y)  # type: ignore[no-any-return]
        mean = getattr(self.bn, "running_mean", torch.zeros(3))
        return F.batch_norm(y, mean, torch.ones(4, dtype=y.dtype))


def test_a_folded_model_that_does_not_run_at_another_size_leaves_the_norm() -> None:
    model = FailsAlone().eval()
    randomize_batchnorm(model)
    report = plan_fold_batchnorm(model, torch.randn(2, 3, 8, 8)).report
    assert len(report.left) == 1
