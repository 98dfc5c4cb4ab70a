"""`export_onnx`: what becomes of outputs, constants and activations, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime
import pytest
import torch
from timm.layers import StdConv2d
from torch import nn

from bnconvert import BnconvertError, export_onnx
from bnconvert.testing import randomize_batchnorm
from tests.export_support import IMAGES, make_net

if TYPE_CHECKING:
    from pathlib import Path


class WithNumbers(nn.Module):
    """Returns a tensor, and more that ONNX cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.net(x)
        return {"scores": y, "rows": x.shape[0], "aux": (None, 0.5), "twice": y * 2}


def test_outputs_that_are_no_tensors_are_left_out_and_said(tmp_path: Path) -> None:
    report = export_onnx(WithNumbers().eval(), tmp_path / "n.onnx", IMAGES)
    assert [out.name for out in onnx.load(tmp_path / "n.onnx").graph.output] == ["scores", "twice"]
    kinds = [note.split()[0] + note.split("type ")[1] for note in report.notes]
    assert kinds == [f"{n}, not a tensor" for n in ("rowsint", "aux_0NoneType", "aux_1float")]


def test_an_unknown_choice_of_external_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BnconvertError, match="external_data: 'yes' is not offered"):
        export_onnx(make_net(), tmp_path / "n.onnx", IMAGES, external_data="yes")  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


class Depends(nn.Module):
    """Does what its inputs say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Noise(nn.Module):
    """Does something else each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Depends(), r"depends on the values of its inputs at .*:\d+;"),
        (Noise(), "each time it runs"),
    ],
)
def test_a_model_that_cannot_be_captured_gets_one_line_that_says_where(
    model: nn.Module, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BnconvertError, match=text):
        export_onnx(nn.Sequential(make_net(), model).eval(), tmp_path / "n.onnx", IMAGES)
    assert not any(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("fold", [True, False])
def test_weights_that_a_model_computes_from_weights_are_stored_computed(
    fold: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        StdConv2d(3, 64, 3),
        nn.ReLU(),
        StdConv2d(64, 64, 3),  # too large for the constant folding of onnxscript
        nn.BatchNorm2d(64),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(64, 64, 3)),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Conv2d(64, 8, 1)),
    )
    randomize_batchnorm(net)
    with torch.no_grad():
        net.get_parameter("4.parametrizations.weight.original0").uniform_(-2.0, 2.0)
    report = export_onnx(net.eval(), tmp_path / "n.onnx", IMAGES, fold=fold)
    left = {} if fold else {"BatchNormalization": 1}
    assert report.nodes == {"Conv": 4, "Relu": 2, **left}
    assert (tmp_path / "n.onnx").stat().st_size < 1.1 * 4 * sum(p.numel() for p in net.parameters())


class Int8(nn.Module):
    """Stores a weight in a quarter of the room."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (64, 768), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.get_buffer("weight").float() / 127
        return nn.functional.linear(x.flatten(1), weight) + torch.zeros(1, 0).sum()


def test_weights_in_whole_numbers_are_stored_as_they_are(tmp_path: Path) -> None:
    report = export_onnx(Int8().eval(), tmp_path / "n.onnx", IMAGES)
    assert report.nodes["Cast"] == 1
    assert (tmp_path / "n.onnx").stat().st_size < 2 * 64 * 768


def test_onnxruntime_fuses_the_gelu_of_opset_18(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU()).eval()
    export_onnx(net, tmp_path / "n.onnx", IMAGES)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(tmp_path / "n.onnx", options, providers=["CPUExecutionProvider"])
    assert "Gelu" in {node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node}
