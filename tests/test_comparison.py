"""`compare`: what it measures, and what it runs on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bnconvert import BnconvertError, compare, export_onnx

if TYPE_CHECKING:
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
