"""Models of torchvision and timm, folded and exported; the whole of timm is `export_census`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models.efficientnet import MBConvConfig

from bnconvert import export_onnx
from bnconvert.testing import randomize_batchnorm
from model_zoo_tests.fold_zoo import smallest_input

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.export import ExportReport

TORCHVISION = (
    "resnet18",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "regnet_x_400mf",
)
TIMM = ("test_byobnet", "test_efficientnet", "test_resnet", "repvgg_a0", "lcnet_035")


def export(model: nn.Module, path: Path, images: torch.Tensor) -> ExportReport:
    randomize_batchnorm(model)
    report = export_onnx(model.eval(), path, images)
    assert report.fold is not None
    assert report.fold.layers
    assert not report.fold.left
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert not {"BatchNormalization", "Identity"} & set(operators)
    return report


@pytest.mark.parametrize("name", TORCHVISION)
def test_classifiers_of_torchvision(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=10)
    export(model, tmp_path / "m.onnx", torch.randn(2, 3, 64, 64))


def test_segmentation_model_keeps_its_output_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, aux_loss=True, num_classes=3
    )
    export(model, tmp_path / "m.onnx", torch.randn(2, 3, 64, 64))
    assert [entry.name for entry in onnx.load(tmp_path / "m.onnx").graph.output] == ["out", "aux"]


def test_detection_backbone_gives_all_its_levels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d
    )
    export(model, tmp_path / "m.onnx", torch.randn(2, 3, 64, 64))
    names = [entry.name for entry in onnx.load(tmp_path / "m.onnx").graph.output]
    assert len(names) == len(set(names)) == 5


@pytest.mark.parametrize("name", TIMM)
def test_small_models_of_timm(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    export(model, tmp_path / "m.onnx", smallest_input(model))


def test_short_efficientnet(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = [
        MBConvConfig(1, 3, 1, 16, 16, 1, 1.0, 1.0),
        MBConvConfig(6, 5, 2, 16, 24, 2, 1.0, 1.0),
    ]
    model = torchvision.models.EfficientNet(blocks, dropout=0.2, num_classes=10)
    export(model, tmp_path / "m.onnx", torch.randn(2, 3, 64, 64))


def test_norms_of_a_densenet_go_when_activations_are_rewritten(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.DenseNet(
        growth_rate=8, block_config=(2, 2, 2), num_init_features=16, num_classes=10
    ).eval()
    randomize_batchnorm(model)
    images = torch.randn(2, 3, 64, 64)
    kept = export_onnx(model, tmp_path / "kept.onnx", images)
    assert kept.fold is not None
    assert kept.nodes["BatchNormalization"] == len(kept.fold.left) > 0
    report = export_onnx(model, tmp_path / "m.onnx", images, rewrite_activations=True)
    assert "BatchNormalization" not in report.nodes
