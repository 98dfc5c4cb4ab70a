"""Weights that lie below wrappers, or below the one key of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from bnconvert.checkpoint import load_checkpoint
from bnconvert.errors import CheckpointError
from tests.test_checkpoint_layouts import EMA, RAW, assert_same, wrapped

if TYPE_CHECKING:
    from pathlib import Path


def test_averages_inside_of_wrappers_and_composer_files_are_read(tmp_path: Path) -> None:
    inside = {f"module.{name}": value for name, value in wrapped(EMA, "n_averaged").items()}
    torch.save(inside, tmp_path / "a.pth")
    assert_same(load_checkpoint(tmp_path / "a.pth").tensors, EMA)
    for key in ("state", "app"):  # of Composer, and of torch's tutorial of distributed checkpoints
        torch.save({key: {"model": RAW, "optim": {}}, "rng": []}, tmp_path / "c.pt")
        checkpoint = load_checkpoint(tmp_path / "c.pt")
        assert_same(checkpoint.tensors, RAW)
        assert f"everything lies below '{key}'" in checkpoint.notes


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"encoder": RAW, "decoder": EMA}, "ema": {"model": EMA}},
        {"backbone": {"layers": RAW}, "optimizer": {"params": EMA}},
        {"generator": {"net": RAW}, "discriminator": {"disc": EMA}},
    ],
)
def test_one_of_several_ways_in_is_not_taken(tmp_path: Path, tree: dict[str, Any]) -> None:
    torch.save(tree, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="holds no tensors by name; its keys are"):
        load_checkpoint(tmp_path / "c.pt")
