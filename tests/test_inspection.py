"""What `inspect_batchnorm` lists, and what it finds suspicious."""

from __future__ import annotations

import json
from typing import Any

import pytest
import timm
import torch
from torch import nn

import bnconvert
from bnconvert import BnconvertError, inspect_batchnorm
from bnconvert.testing import randomize_batchnorm


def trained(layer: Any) -> Any:
    """Return the layer with statistics that look trained."""
    randomize_batchnorm(layer)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(7)
    return layer


def findings(model: nn.Module) -> dict[str, str]:
    return {f.name: f.text for f in inspect_batchnorm(model).findings}


@pytest.mark.parametrize("name", ["running_mean", "weight", "bias"])
def test_values_that_are_not_finite_are_found(name: str) -> None:
    layer = trained(nn.BatchNorm2d(4))
    with torch.no_grad():
        getattr(layer, name)[1] = float("-inf")
    text = f"{name} is not finite in 1 of 4 channels, the first is channel 1 (-inf)"
    assert findings(layer) == {"": text}


def test_a_layer_with_one_running_statistic_is_listed() -> None:
    (layer,) = inspect_batchnorm(nn.Sequential(timm.layers.EvoNorm2dB0(4))).layers
    assert (layer.kind, layer.stats, layer.channels) == ("unknown", "live", 4)


def test_every_kind_of_layer_is_listed_with_its_facts() -> None:
    shared = trained(nn.BatchNorm2d(3, eps=1e-3, momentum=None))
    model = nn.ModuleDict(
        {
            "a": shared,
            "b": shared,
            "no_affine": trained(nn.BatchNorm1d(4, affine=False)),
            "sync": trained(bnconvert.SyncBatchNorm3d(5).half()),
            "frozen": trained(bnconvert.FrozenBatchNorm2d(6)),
            "torch_sync": trained(nn.SyncBatchNorm(7)),
            "lazy": nn.LazyBatchNorm2d(),
            "relu": nn.ReLU(),
        }
    )
    inspection = inspect_batchnorm(model)
    found = {layer.name: layer for layer in inspection.layers}
    assert list(found) == ["a", "no_affine", "sync", "frozen", "torch_sync", "lazy"]
    assert found["a"].names == ("a", "b")
    assert (found["a"].channels, found["a"].eps, found["a"].momentum) == (3, 1e-3, None)
    assert found["no_affine"].affine == "none"
    assert (found["sync"].dtype, found["sync"].group) == ("float16", "default group")
    assert (found["frozen"].stats, found["frozen"].affine) == ("frozen", "frozen")
    assert found["torch_sync"].group == "synchronised by torch"
    assert found["lazy"].channels is None
    text = str(inspection)
    assert "a (also b)" in text
    assert "cumulative" in text
    assert "F.batch_norm" in text
    assert json.loads(json.dumps(inspection.to_dict()))["layers"][0]["name"] == "a"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "running_var is zero in 1 of 4 channels, the first is channel 2 (0)"),
        (-1.0, "running_var is negative in 1 of 4 channels, the first is channel 2 (-1)"),
        (float("inf"), "running_var is not finite in 1 of 4 channels, the first is channel 2"),
        (float("nan"), "running_var is not finite in 1 of 4 channels"),
        (7e4, "running_var is beyond float16 in 1 of 4 channels, the first is channel 2 (70000)"),
    ],
)
def test_suspicious_variances(value: float, text: str) -> None:
    layer = trained(nn.BatchNorm2d(4)).eval()
    assert findings(layer) == {}
    layer.running_var[2] = value
    assert findings(layer)[""].startswith(text)


def test_statistics_that_were_never_updated() -> None:
    assert "never updated" in findings(nn.BatchNorm2d(4))[""]
    layer = trained(nn.BatchNorm2d(4))
    layer.num_batches_tracked.zero_()
    assert "num_batches_tracked is 0" in findings(layer)[""]


def test_half_freezing_is_found() -> None:
    model = nn.ModuleDict(
        {
            "momentum": trained(nn.BatchNorm2d(3, momentum=0.0)),
            "untracked": nn.BatchNorm2d(3, track_running_stats=False),
            "in_eval": trained(nn.BatchNorm2d(3)).eval(),
        }
    )
    found = findings(model)
    assert found["momentum"].startswith("momentum is 0")
    assert found["untracked"].startswith("track_running_stats is False")
    assert found["in_eval"].startswith("is in eval mode inside a model in training mode")
    model.eval()
    assert "in_eval" not in findings(model)


def test_meta_and_parametrized_models_are_inspected() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm2d(3))
    assert inspect_batchnorm(model).layers[0].channels == 3


def test_other_objects_are_refused() -> None:
    with pytest.raises(BnconvertError, match="got OrderedDict"):
        inspect_batchnorm(nn.BatchNorm2d(3).state_dict())  # type: ignore[arg-type]
