"""What `inspect_batchnorm` lists, and what it finds suspicious."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bnconvert
from bnconvert import BnconvertError, inspect_batchnorm
from bnconvert.testing import randomize_batchnorm, run_ranks


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


class Odd(nn.Module):
    """Another library's layer, with statistics that a layer of torch does not have."""

    def __init__(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_var", var)
        self.eps = np.float32(1e-5)
        self.momentum = torch.tensor(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("mean", "var", "found"),
    [
        (torch.rand(1, 3, 1, 1), torch.tensor([[[[1.0]], [[-2.0]], [[1.0]]]]), "negative"),
        (torch.tensor(0.3), torch.tensor(0.0), "running_var is zero in 1 of 1"),
        (torch.rand(3, dtype=torch.complex64), torch.eye(3) + 0.5, None),
        (torch.tensor([1j, complex("inf")]), torch.rand(2) + 1, "first is channel 1 (inf+0j)"),
        (torch.rand(3).to(torch.float8_e4m3fn), (torch.rand(3) + 1).to(torch.float8_e4m3fn), None),
    ],
)
def test_statistics_of_every_shape_and_dtype(
    mean: torch.Tensor, var: torch.Tensor, found: str | None
) -> None:
    inspection = inspect_batchnorm(nn.Sequential(Odd(mean, var)))
    texts = [finding.text for finding in inspection.findings]
    assert [found in text for text in texts] == [True] if found else not texts
    layer = json.loads(json.dumps(inspection.to_dict()))["layers"][0]
    assert (layer["eps"], layer["momentum"]) == pytest.approx((1e-5, 0.1))


def test_weights_without_statistics_are_looked_at() -> None:
    layer = nn.BatchNorm2d(4, track_running_stats=False)
    with torch.no_grad():
        layer.bias[3] = float("nan")
    found = [f.text for f in inspect_batchnorm(layer).findings]
    assert found[-1] == "bias is not finite in 1 of 4 channels, the first is channel 3 (nan)"


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("form", ["script", "trace"])
def test_scripted_models_are_listed(form: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), trained(nn.BatchNorm2d(4)).eval())
    x = torch.randn(2, 3, 8, 8)
    trace: Any = torch.jit.trace
    scripted = torch.jit.script(model) if form == "script" else trace(model, x)
    (layer,) = inspect_batchnorm(scripted).layers
    assert (layer.name, layer.kind, layer.channels, layer.stats) == ("1", "scripted", 4, "live")
    assert "cumulative" not in str(inspect_batchnorm(scripted))


def shard_findings(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    layer = trained(nn.BatchNorm2d(4))
    model = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight[3] = float("nan")
        fully_shard(model, mesh=mesh)
    return [f.text for f in inspect_batchnorm(model).findings]


def test_of_a_sharded_model_each_rank_looks_at_its_part() -> None:
    where = "in 1 of 2 channels of this rank's shard, the first is channel 1 (nan)"
    assert run_ranks(shard_findings, 2) == [[], [f"weight is not finite {where}"]]


def test_meta_and_parametrized_models_are_inspected() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm2d(3))
    assert inspect_batchnorm(model).layers[0].channels == 3


def test_other_objects_are_refused() -> None:
    with pytest.raises(BnconvertError, match="got OrderedDict"):
        inspect_batchnorm(nn.BatchNorm2d(3).state_dict())  # type: ignore[arg-type]
