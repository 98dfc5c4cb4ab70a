"""Averages without names: given to the raw weights' names where order and shapes prove them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bnconvert.checkpoint import convert_checkpoint, load_checkpoint
from bnconvert.errors import CheckpointError
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from pathlib import Path


class Net(nn.Module):
    """Parameters and buffers in turn, one parameter under two names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(1))
        self.conv = nn.Conv2d(3, 4, 1)
        self.norms = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        randomize_batchnorm(self, seed)


RAW, AVERAGE = Net(0), Net(1)


def saved(path: Path, average: Any, **more: Any) -> Path:
    torch.save({"model": RAW.state_dict(), "ema": average, **more}, path)
    return path


def shadow(values: list[Any]) -> dict[str, Any]:
    """Return what `torch_ema.ExponentialMovingAverage.state_dict` returns."""
    return {"decay": 0.99, "num_updates": 3, "shadow_params": values, "collected_params": None}


VALUES = [value.detach().clone() for value in AVERAGE.parameters()]


@pytest.mark.parametrize("average", [shadow(VALUES), VALUES], ids=["torch_ema", "list"])
@pytest.mark.parametrize("weights", ["auto", "ema"])
def test_a_list_gets_the_names_of_the_parameters_and_the_raw_statistics(
    tmp_path: Path, average: Any, weights: str
) -> None:
    path = saved(tmp_path / "c.pt", average, optimizer={})
    checkpoint = load_checkpoint(path, weights=weights)
    parameters = dict(AVERAGE.named_parameters(remove_duplicate=False))
    assert set(checkpoint.tensors) == set(RAW.state_dict())
    for name, value in checkpoint.tensors.items():
        assert torch.equal(value, parameters.get(name, RAW.state_dict()[name])), name
    assert "order of the parameters: all 10 shapes agree" in checkpoint.notes[0]
    raw = load_checkpoint(path, weights="raw")
    assert torch.equal(raw.tensors["conv.weight"], RAW.conv.weight)
    convert_checkpoint(path, tmp_path / "w.safetensors", weights=weights)
    again = load_checkpoint(tmp_path / "w.safetensors").tensors
    assert torch.equal(again["decode.weight"], AVERAGE.encode.weight)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (VALUES[:-1], "9 tensors for 10 raw ones"),
        ([*VALUES[:2], *VALUES[2:][::-1]], "would have shape"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_or_left_with_a_note(
    tmp_path: Path, values: list[Any], reason: str
) -> None:
    path = saved(tmp_path / "c.pt", shadow(values))
    with pytest.raises(CheckpointError, match=rf"c\.pt.*ema has no names.*{reason}"):
        load_checkpoint(path, weights="ema")
    checkpoint = load_checkpoint(path)
    assert torch.equal(checkpoint.tensors["conv.weight"], RAW.conv.weight)
    assert "auto chose the raw weights (model)" in checkpoint.notes[0]
    assert reason in checkpoint.notes[0]
