"""What the tests of export share."""

from __future__ import annotations

import torch
from torch import nn

from bnconvert.testing import randomize_batchnorm

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    randomize_batchnorm(net)
    return net.eval()
