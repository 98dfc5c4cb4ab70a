"""What the tests of folding share: toy models, and folding with a comparison in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnconvert import plan_fold_batchnorm
from bnconvert.report import Outcome
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from bnconvert.report import Report


class Steps(nn.Module):
    """Named layers and a function that uses them."""

    def __init__(self, steps: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.steps = steps
        self.names = tuple(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Layers are attributes of any kind to the type checker."""

    def forward(self, x: Tensor) -> Any:
        return self.steps(x, **{name: getattr(self, name) for name in self.names})


def conv_bn() -> Any:
    """Return a convolution, a BatchNorm and a ReLU in eval mode."""
    model = nn.Sequential(nn.Conv2d(6, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
    randomize_batchnorm(model)
    return model


def image() -> Tensor:
    """Return two images of six channels."""
    return torch.randn(2, 6, 8, 8, generator=torch.Generator().manual_seed(1))


def check_folds(
    model: nn.Module, x: Tensor, folded: int = 1, left: int = 0, **options: Any
) -> Report:
    """Fold in float64 and compare with the model's own output, at two batch sizes."""
    torch.manual_seed(0)
    model = model.double().eval()
    randomize_batchnorm(model)
    inputs = [x.double(), torch.randn(3, *x.shape[1:], dtype=torch.float64)]
    with torch.no_grad():
        expected = [model(value) for value in inputs]
    plan = plan_fold_batchnorm(model, inputs[0], **options)
    assert plan.report.count(Outcome.FOLDED) == folded, str(plan)
    assert len(plan.report.left) == left, str(plan)
    plan.apply()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == left
    with torch.no_grad():
        for value, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(value), wanted, rtol=1e-11, atol=1e-11)
    return plan.report
