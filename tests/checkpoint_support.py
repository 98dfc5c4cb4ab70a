"""What the tests of checkpoints share: a model, a state dict of many dtypes, equal bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bnconvert.testing import randomize_batchnorm

KINDS = {"safetensors": "w.safetensors", "torch": "w.pth", "sharded": "w"}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.BatchNorm1d(5))
    randomize_batchnorm(model, seed)
    return model


def mixed_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {
        f"d.{str(dtype).removeprefix('torch.')}": torch.arange(-3, 4).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
            torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16,
            torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
        )
    }  # fmt: skip
    state["empty"] = torch.zeros(0, 3)
    state["scalar"] = torch.tensor(2.5)
    state["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    state["strided"] = torch.randn(4, 6).T
    state["first"] = torch.randn(5)
    state["same"] = state["first"]
    return state


def assert_bits(loaded: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert loaded[name].shape == value.shape, name
        left = loaded[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(left, value.contiguous().reshape(-1).view(torch.uint8)), name
