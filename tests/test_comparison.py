"""`compare`: what it measures, and what it runs on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from PIL import Image
from torch import nn

from bnconvert import BnconvertError, compare, export_onnx

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INPUTS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


def test_equal_models_do_not_differ_and_keep_their_modes() -> None:
    net = make_net()
    net[1].eval()
    modes = [module.training for module in net.modules()]
    result = compare(net, copy.deepcopy(net), INPUTS)
    assert result.largest_difference == 0.0
    assert (result.top1, result.top5) == (1.0, 1.0)
    assert [module.training for module in net.modules()] == modes
    assert net[1].num_batches_tracked == 0


def test_a_known_difference_is_measured_relative_to_the_second() -> None:
    class Add(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x + self.value

    x = torch.tensor([[1.0, -4.0]])
    result = compare(Add(0.5), Add(0.0), x)
    first, second = result.outputs
    assert (first.relative, first.absolute) == (0.0, 0.0)
    assert (second.relative, second.absolute) == (0.125, 0.5)
    assert result.largest_difference == 0.125


def test_agreement_counts_rows_and_shared_classes() -> None:
    class Fixed(nn.Module):
        def __init__(self, order: list[int]) -> None:
            super().__init__()
            self.scores = -torch.tensor([order, range(7)]).argsort(1).float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scores + 0 * x[:2, :1]

    result = compare(Fixed([6, 5, 0, 1, 2, 3, 4]), Fixed([0, 1, 2, 3, 4, 5, 6]), INPUTS)
    assert result.top1 == 0.5
    assert result.top5 == pytest.approx((3 / 5 + 1) / 2)


class Named(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: x + float(ord(name)) for name in self.names}


def test_outputs_with_the_same_names_pair_by_name() -> None:
    x = torch.ones(2, 3)
    assert compare(Named("a", "b"), Named("b", "a"), x).largest_difference == 0.0
    assert compare(Named("a", "b"), Named("b", "c"), x).largest_difference > 0.0


def test_what_is_no_model_and_no_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(BnconvertError, match="compare: expected a module or the path of an ONNX"):
        compare(3, nn.Identity(), torch.ones(2, 3))  # type: ignore[arg-type]


def test_another_shape_is_named(tmp_path: Path) -> None:
    comparison = compare(nn.Linear(3, 4), nn.Linear(3, 5), torch.ones(2, 3))
    assert comparison.outputs[0].relative == float("inf")
    assert "2x4    inf       inf       the other's shape is 2x5" in str(comparison)


@pytest.mark.parametrize("nan", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_in_one_is_an_infinite_difference(nan: float) -> None:
    class Spoil(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0.5, nan, x)

    assert compare(Spoil(), nn.Identity(), INPUTS).largest_difference == float("inf")
    assert compare(Spoil(), Spoil(), INPUTS).largest_difference == 0.0


class Turned(nn.Module):
    def __init__(self, angle: complex) -> None:
        super().__init__()
        self.angle = angle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.angle)


def test_imaginary_parts_count() -> None:
    comparison = compare(Turned(0.75j), Turned(0j), INPUTS)
    assert comparison.largest_difference == pytest.approx(0.75)
    assert comparison.outputs[0].absolute == pytest.approx(0.75 * INPUTS.abs().max().item())
    assert compare(Turned(1j), Turned(1j), INPUTS).largest_difference == 0.0


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x > 0,
        lambda x: (10 * x).to(torch.int64),
        lambda x: x.relu().to_sparse(),
        lambda x: x.half(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.where(x > 0, float("inf"), x),
        lambda x: x.to(torch.float8_e4m3fn),
    ],
)
def test_every_kind_of_output_is_compared(function: Callable[[torch.Tensor], Any]) -> None:
    same = compare(Apply(function), Apply(function), INPUTS)
    assert (same.largest_difference, same.outputs[0].absolute) == (0.0, 0.0)
    other = compare(Apply(lambda x: function(-x)), Apply(function), INPUTS)
    assert other.largest_difference > 0.5


def test_no_tensors_and_nothing_to_compare_is_said() -> None:
    with pytest.raises(BnconvertError, match="Apply gives no tensor"):
        compare(Apply(lambda _: None), Apply(lambda _: 3), INPUTS)


@pytest.mark.parametrize("preprocess", [False, True])
def test_a_size_that_a_file_has_fixed_is_kept(tmp_path: Path, preprocess: bool) -> None:
    model = timm.create_model("test_resnet").eval()
    path = tmp_path / "one.onnx"
    images = torch.randn(1, 3, 64, 48)
    export_onnx(model, path, images, dynamic_batch=False, preprocess=preprocess)
    for pair in ((path, path), (model, path)):
        comparison = compare(*pair)
        assert comparison.inputs == "1 random image"
        assert comparison.largest_difference < 1e-5
    write_small(tmp_path / "0.png")
    assert compare(model, path, images=tmp_path).inputs == "1 image"


def write_small(path: Path) -> None:
    Image.new("RGB", (64, 64)).save(path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("no image"), "cannot be read as an image"),
        (lambda path: path.write_bytes(b"P5 99999 99999 255\n"), "cannot be read as an image"),
        (lambda path: Image.new("F", (8, 8)).save(path, "TIFF"), "floating point numbers"),
    ],
)
def test_photos_that_cannot_be_read_are_named(
    tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    model = timm.create_model("test_resnet").eval()
    write_small(tmp_path / "0.png")
    (tmp_path / "._0.png").write_bytes(b"what macOS leaves behind")
    assert compare(model, model, images=tmp_path).inputs == "1 image"
    write(tmp_path / "bad.png")
    with pytest.raises(BnconvertError, match=rf"bad\.png: .*{message}"):
        compare(model, model, images=tmp_path)


def test_files_and_modules_pair_in_any_way(tmp_path: Path) -> None:
    net = make_net().eval()
    export_onnx(net, tmp_path / "net.onnx", INPUTS)
    pairs: list[tuple[Any, Any]] = [(net, tmp_path / "net.onnx"), (str(tmp_path / "net.onnx"), net)]
    for a, b in pairs:
        assert compare(a, b, INPUTS).largest_difference < 1e-6
    same = compare(tmp_path / "net.onnx", tmp_path / "net.onnx")
    assert same.largest_difference == 0.0
    assert same.inputs == "random values"


def test_bad_input_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    net = make_net()
    cases: list[tuple[Any, Any, Any, str]] = [
        (net, tmp_path / "none.onnx", INPUTS, "no such file"),
        (net, tmp_path / "bad.onnx", INPUTS, "onnxruntime does not load it"),
        (net, net, None, "no timm configuration"),
        (net, nn.LSTM(3, 3), INPUTS, "outputs"),
    ]
    for a, b, inputs, message in cases:
        with pytest.raises(BnconvertError, match=message) as error:
            compare(a, b, inputs)
        assert "\n" not in str(error.value)


def test_a_file_without_its_weights_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    images = torch.randn(2, 3, 8, 8)
    export_onnx(model, tmp_path / "a.onnx", images, external_data=True)
    (tmp_path / "a.onnx.data").unlink()
    with pytest.raises(BnconvertError, match=r"a\.onnx: its weights are in a\.onnx\.data, which"):
        compare(model, tmp_path / "a.onnx", images)
