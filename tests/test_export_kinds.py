"""`export_onnx` on each kind of model and with each option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from bnconvert import (
    BnconvertError,
    compare,
    convert_sync_batchnorm,
    export_onnx,
    fold_batchnorm,
    freeze_batchnorm,
)
from bnconvert.errors import VerificationError
from bnconvert.export import exporter, files
from bnconvert.export.opset import to_opset
from bnconvert.testing import randomize_batchnorm
from tests.export_support import IMAGES, make_net


def norms(path: Path) -> int:
    return sum(node.op_type == "BatchNormalization" for node in onnx.load(path).graph.node)


class Heads(nn.Module):
    """One convolution for two levels, with a BatchNorm for each, as detectors have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norms[0](self.conv(x)), self.norms[1](self.conv(x[..., ::2, ::2]))


class TwoConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.b = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        return torch.mul(a, b)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
        self.b = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.mean((1, 2))
        return torch.sub(self.a(rows), self.b(rows))


class RepBlock(nn.Module):
    """Parallel linear branches, one of them the identity, as RepVGG trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3))
        self.thin = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3))
        self.skip = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.wide(x) + self.thin(x) + self.skip(x))


@pytest.mark.parametrize("kind", [Heads, TwoConvs, TwoLinears, RepBlock])
def test_shared_and_parallel_branches_are_right_in_every_run(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    model = kind().eval()
    randomize_batchnorm(model)
    report = export_onnx(model, tmp_path / "m.onnx", IMAGES)
    assert {check.batch for check in report.checks} == {1, 2, 5}
    assert report.largest_difference < 1e-5
    assert norms(tmp_path / "m.onnx") == 0
    if kind is RepBlock:
        assert report.nodes["Conv"] == 1


@pytest.mark.parametrize("kind", ["ours", "torch", "frozen", "folded", "parallel", "compiled"])
def test_models_in_every_state_export_as_what_they_compute(tmp_path: Path, kind: str) -> None:
    net = make_net()
    expected = net(IMAGES)
    model: Any = net
    if kind == "ours":
        model = convert_sync_batchnorm(net)
    elif kind == "torch":
        torch_converter: Any = nn.SyncBatchNorm
        model = torch_converter.convert_sync_batchnorm(net).eval()
    elif kind == "frozen":
        model = freeze_batchnorm(net)
    elif kind == "folded":
        model = fold_batchnorm(net, IMAGES)
    elif kind == "parallel":
        model = nn.DataParallel(net)
    elif kind == "compiled":
        model = torch.compile(net)
    classes = [type(module) for module in net.modules()]
    export_onnx(model, tmp_path / "m.onnx", IMAGES)
    assert [type(module) for module in net.modules()] == classes
    assert norms(tmp_path / "m.onnx") == 0
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (result,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The tensor attribute self.0.weight was assigned:UserWarning")
def test_weight_that_a_hook_computed_does_not_stop_the_copy(tmp_path: Path) -> None:
    net = make_net()
    net[0] = nn.utils.weight_norm(net[0])
    net(IMAGES)  # leaves a weight that deepcopy refuses
    assert not net[0].weight.is_leaf
    export_onnx(net, tmp_path / "m.onnx", IMAGES)
    assert compare(tmp_path / "m.onnx", net, IMAGES).largest_difference < 1e-5


def test_without_folding_the_nodes_stay(tmp_path: Path) -> None:
    report = export_onnx(make_net(), tmp_path / "m.onnx", IMAGES, fold=False)
    assert report.fold is None
    assert norms(tmp_path / "m.onnx") == 2


def test_norm_before_relu_goes_only_when_activations_may_be_rewritten(tmp_path: Path) -> None:
    net = nn.Sequential(
        nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten()
    ).eval()
    randomize_batchnorm(net)
    for rewrite, left in ((False, 1), (True, 0)):
        path = tmp_path / f"{rewrite}.onnx"
        report = export_onnx(net, path, IMAGES, rewrite_activations=rewrite)
        assert report.fold is not None
        assert len(report.fold.left) == norms(path) == left


def test_half_precision_rounds_weights_and_keeps_float32_outside(tmp_path: Path) -> None:
    net = make_net()
    report = export_onnx(net, tmp_path / "half.onnx", IMAGES, dtype=torch.float16)
    model = onnx.load(tmp_path / "half.onnx")
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds
    assert onnx.TensorProto.FLOAT not in kinds
    for entry in (*model.graph.input, *model.graph.output):
        assert entry.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert 1e-5 < report.largest_difference < 1e-2


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def large(kind: str) -> nn.Sequential:
    """Return a model whose values between its layers are beyond float16."""
    torch.manual_seed(0)
    first, last, norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(8)
    layers: dict[str, list[nn.Module]] = {
        "conv": [first, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), last],
        "norm": [first, nn.ReLU(), norm, nn.ReLU(), last],
        "product": [first, Square(), last],
        "tiny": [first, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), last],
    }
    net = nn.Sequential(*layers[kind]).eval()
    randomize_batchnorm(net)
    factor = 1e-9 if kind == "tiny" else 1e6
    with torch.no_grad():
        first.weight.mul_(factor)
        assert first.bias is not None
        first.bias.mul_(factor)
        if kind == "norm":
            norm.get_buffer("running_mean").mul_(factor)
            norm.get_buffer("running_var").mul_(factor**2)
        else:
            net[2].get_parameter("weight").mul_(factor**-2 if kind == "product" else 1 / factor)
    return net


@pytest.mark.parametrize("kind", ["conv", "norm", "product", "tiny"])
def test_half_precision_keeps_what_it_cannot_hold_in_float32(tmp_path: Path, kind: str) -> None:
    net = large(kind)
    expected = net(IMAGES)
    report = export_onnx(net, tmp_path / "half.onnx", IMAGES, dtype=torch.float16)
    assert any(note.startswith("kept in float32") and "0/Conv" in note for note in report.notes)
    assert norms(tmp_path / "half.onnx") == (kind == "norm")
    assert report.largest_difference < 2e-3
    naive = net.half()(IMAGES.half()).float()
    error = (naive - expected).abs().max() / expected.abs().max()
    assert not error < 0.1  # infinite, NaN, or all zero


def test_another_image_size_is_proven_or_refused(tmp_path: Path) -> None:
    report = export_onnx(make_net(), tmp_path / "m.onnx", IMAGES, dynamic_size=True)
    assert {check.size for check in report.checks} == {None, (48, 80)}
    dims = onnx.load(tmp_path / "m.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims] == ["batch", "", "height", "width"]
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 4)).eval()
    with pytest.raises(BnconvertError, match=r"^dynamic_size: .* does not run on images of 48x80"):
        export_onnx(fixed, tmp_path / "fixed.onnx", IMAGES, dynamic_size=True)


def test_a_size_that_the_forward_fixes_is_named(tmp_path: Path) -> None:
    class Fixes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = 2 if torch.compiler.is_exporting() else len(x)
            return torch.ones(rows, 4) + x.mean()

    refusal = r"with batch size 1 output output has shape \(2, 4\) and not \(1, 4\)"
    with pytest.raises(VerificationError, match=refusal):
        export_onnx(Fixes(), tmp_path / "m.onnx", IMAGES)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 15, 17])
def test_older_opsets_are_honoured(tmp_path: Path, opset: int) -> None:
    report = export_onnx(make_net(), tmp_path / "m.onnx", IMAGES, opset=opset)
    assert report.opset == opset
    assert [entry.version for entry in onnx.load(tmp_path / "m.onnx").opset_import] == [opset]


@pytest.mark.parametrize("opset", [11, 13, 17])
def test_newer_operators_are_put_in_older_terms(tmp_path: Path, opset: int) -> None:
    """HardSwish, which came with 14, and axes and sizes that became inputs with 13 and 18."""

    class Newer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = torch.split(nn.functional.hardswish(self.bn(self.conv(x))), [2, 4], 1)
            return torch.cat([one, two.relu()], 1).mean((2, 3)).unsqueeze(1)

    model = Newer().eval()
    randomize_batchnorm(model)
    report = export_onnx(model, tmp_path / "m.onnx", IMAGES, opset=opset)
    assert report.opset == opset
    graph = onnx.load(tmp_path / "m.onnx")
    assert [entry.version for entry in graph.opset_import] == [opset]
    assert not {"HardSwish", "Identity"} & {node.op_type for node in graph.graph.node} or opset > 13


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_softmax_along_an_axis_and_resizing_reach_older_opsets(tmp_path: Path, opset: int) -> None:
    """Older Softmax normalises over all axes from the given one on; Resize came with opset 10."""

    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.softmax(1) + x.log_softmax(-1)
            return y if opset < 11 else nn.functional.interpolate(y, scale_factor=2.0)

    report = export_onnx(Attends(), tmp_path / "m.onnx", IMAGES, opset=opset)
    assert report.opset == opset


def test_older_opset_that_lacks_an_operator_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.GELU()).eval()
    refusal = r"^opset: .* cannot be expressed in opset 8 \(.*Erf.*; choose 9 or higher$"
    with pytest.raises(BnconvertError, match=refusal):
        export_onnx(net, tmp_path / "m.onnx", IMAGES, opset=8)
    assert not list(tmp_path.iterdir())


def test_external_weights_move_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    net = make_net()
    net[7] = nn.Linear(8, 500)
    monkeypatch.setattr(files, "LARGEST_SINGLE_FILE", 10_000)
    report = export_onnx(net, tmp_path / "a" / "m.onnx", IMAGES)
    assert [path.name for path in report.files] == ["m.onnx", "m.onnx.data"]
    (tmp_path / "a").rename(tmp_path / "b")
    assert compare(net, tmp_path / "b" / "m.onnx", IMAGES).largest_difference < 1e-5
    with pytest.raises(BnconvertError, match="one ONNX file holds less than 2 GB"):
        export_onnx(net, tmp_path / "m.onnx", IMAGES, external_data=False)


def test_first_diverging_layer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(graph: Any, opset: int) -> Any:
        (node,) = [node for node in graph.graph if node.name == "3/Conv"]
        node.attributes.pop("pads")
        node.attributes.add(onnx_ir_ints("pads", [2, 0, 0, 2]))
        return to_opset(graph, opset)

    monkeypatch.setattr(exporter, "to_opset", spoil)
    with pytest.raises(VerificationError, match="the first layer that differs is 4;"):
        export_onnx(make_net(), tmp_path / "m.onnx", IMAGES)
    assert not list(tmp_path.iterdir())


def onnx_ir_ints(name: str, values: list[int]) -> Any:
    import onnx_ir

    return onnx_ir.AttrInt64s(name, values)


EXPORT = """
import sys, torch
from tests.test_export_kinds import IMAGES, make_net
from bnconvert import export_onnx
export_onnx(make_net(), sys.argv[1], IMAGES)
"""


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "2")):
        command = [sys.executable, "-c", EXPORT, str(tmp_path / name)]
        root = Path(__file__).parent.parent
        subprocess.run(command, check=True, cwd=root, env={"PYTHONHASHSEED": seed})  # noqa: S603
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
