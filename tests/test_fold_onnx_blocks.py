"""`fold_onnx` through what moves values between channels and blocks of pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bnconvert import export_onnx
from bnconvert.export import fold_onnx
from bnconvert.testing import randomize_batchnorm
from tests.onnx_graph import C, Graph, conv, count

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def out_of_blocks(g: Graph, **mode: Any) -> str:
    return g.norm(g.call("DepthToSpace", conv(g, "x", 3 * 4), blocksize=2, **mode), 3)


def out_of_blocks_forward(g: Graph) -> str:
    y = g.call("Relu", conv(g, "x", 3 * 4))
    return conv(g, g.call("DepthToSpace", repeated(g, y), blocksize=2), 4, 3)


def repeated(g: Graph, y: str) -> str:
    """A norm whose four channels of a block are one."""
    y = g.call("DepthToSpace", y, blocksize=2)
    return g.call("SpaceToDepth", g.norm(y, 3), blocksize=2)


def into_blocks_forward(g: Graph) -> str:
    y = g.call("SpaceToDepth", g.norm(g.call("Relu", "x")), blocksize=2)
    return conv(g, y, 5, 4 * C)


def both(g: Graph) -> str:
    y = g.call("DepthToSpace", conv(g, "x", 4 * C), blocksize=2, mode="CRD")
    return g.norm(g.call("SpaceToDepth", y, blocksize=2), 4 * C)


@pytest.mark.parametrize(
    "build",
    [
        out_of_blocks,
        lambda g: out_of_blocks(g, mode="DCR"),
        lambda g: out_of_blocks(g, mode="CRD"),
        out_of_blocks_forward,
        into_blocks_forward,
        both,
    ],
)
def test_the_norm_is_folded(tmp_path: Path, build: Callable[[Graph], str]) -> None:
    g = Graph()
    report = fold_onnx(g.save(tmp_path / "in.onnx", [build(g)]), tmp_path / "out.onnx")
    assert not report.left, str(report)
    assert count(tmp_path / "out.onnx") == 0
    assert report.float64 is not None
    assert report.float64 < 1e-12


def test_channels_that_become_pixels_are_left(tmp_path: Path) -> None:
    g = Graph()
    y = g.norm(g.call("SpaceToDepth", conv(g, "x", pads=[1, 1, 1, 1]), blocksize=2), 4 * C)
    report = fold_onnx(g.save(tmp_path / "in.onnx", [y]), tmp_path / "out.onnx")
    assert len(report.left) == 1
    assert count(tmp_path / "out.onnx") == 1


@pytest.mark.parametrize("shuffle", [nn.PixelShuffle(2), nn.PixelUnshuffle(2)])
def test_what_torch_exports_is_folded(tmp_path: Path, shuffle: nn.Module) -> None:
    channels = shuffle(torch.zeros(1, 8, 4, 4)).shape[1]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), shuffle, nn.BatchNorm2d(channels))
    model.append(nn.Conv2d(channels, 2, 1))
    if isinstance(shuffle, nn.PixelShuffle):
        del model[1]
    randomize_batchnorm(model)
    export_onnx(model.eval(), tmp_path / "in.onnx", torch.randn(2, 3, 10, 10), fold=False)
    assert count(tmp_path / "in.onnx") == 1
    assert not fold_onnx(tmp_path / "in.onnx", tmp_path / "out.onnx").left
