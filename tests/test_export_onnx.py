"""`export_onnx`: the file equals the model, and the model is left alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import onnx
import pytest
import torch
from torch import nn

import bnconvert
from bnconvert import BnconvertError, export_onnx
from bnconvert.comparison.runners import RuntimeLevel
from bnconvert.errors import VerificationError
from bnconvert.testing import randomize_batchnorm
from tests.export_support import IMAGES, make_net

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def state_of(model: nn.Module) -> list[Any]:
    """Everything about a model that an export must not change."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [
            (name, type(m), id(m), m.training, len(m._forward_hooks))
            for name, m in model.named_modules()
        ],
        [
            (name, id(t), t.requires_grad, t.dtype, t.detach().clone().tolist())
            for name, t in tensors
        ],
    ]


def test_every_proven_run_is_close_to_torch_in_both_precisions(tmp_path: Path) -> None:
    report = export_onnx(make_net(), tmp_path / "net.onnx", IMAGES)
    runs = {(check.batch, check.level) for check in report.checks}
    assert runs == {(batch, level) for batch in (1, 2, 5) for level in RuntimeLevel}
    for check in report.checks:
        assert check.difference < 1e-5
        assert check.from_float64 is not None
        assert check.from_float64 < 1e-5


def test_model_is_left_as_it_was_and_training_mode_is_noted(tmp_path: Path) -> None:
    net = make_net().train()
    net[1].eval()
    net[2].register_forward_hook(lambda *_: None)
    before = state_of(net)
    report = export_onnx(net, tmp_path / "net.onnx", IMAGES)
    assert state_of(net) == before
    assert any("training mode" in note for note in report.notes)
    assert bnconvert.compare(net, tmp_path / "net.onnx", IMAGES).largest_difference < 1e-5


def test_hook_that_changes_an_output_is_in_the_file(tmp_path: Path) -> None:
    net = make_net()
    net[1].register_forward_hook(lambda _module, _args, output: output * 2 + 1)
    export_onnx(net, tmp_path / "net.onnx", IMAGES)
    assert bnconvert.compare(net, tmp_path / "net.onnx", IMAGES).largest_difference < 1e-5


def test_folder_holds_one_file_afterwards(tmp_path: Path) -> None:
    report = export_onnx(make_net(), tmp_path / "net.onnx", IMAGES)
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    assert report.files == {tmp_path / "net.onnx": (tmp_path / "net.onnx").stat().st_size}


def test_inputs_outputs_and_sizes_have_plain_names(tmp_path: Path) -> None:
    export_onnx(make_net(), tmp_path / "net.onnx", IMAGES)
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert [entry.name for entry in graph.output] == ["output"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {node.name for node in graph.node} >= {"0/Conv", "3/Conv", "7/Gemm"}
    assert not [node for node in graph.node if node.op_type == "Identity"]


def test_static_batch_takes_the_size_of_the_example(tmp_path: Path) -> None:
    report = export_onnx(make_net(), tmp_path / "net.onnx", IMAGES, dynamic_batch=False)
    assert {check.batch for check in report.checks} == {2}
    dims = onnx.load(tmp_path / "net.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == list(IMAGES.shape)


class TwoInputs(nn.Module):
    """Takes a positional and keyword arguments, returns a nested structure."""

    def __init__(self) -> None:
        super().__init__()
        self.image = make_net()
        self.side = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        randomize_batchnorm(self.side, seed=1)

    def forward(
        self, image: torch.Tensor, *, side: torch.Tensor, scale: float = 1.0
    ) -> dict[str, Any]:
        a, b = self.image(image), self.side(side)
        return {"sum": a + scale * b, "parts": (a, b)}


@pytest.mark.parametrize("as_dict", [True, False])
def test_two_inputs_and_nested_outputs_keep_their_names(tmp_path: Path, as_dict: bool) -> None:
    inputs: dict[str, Any] = {"image": IMAGES, "side": torch.randn(2, 4), "scale": 0.5}
    model: nn.Module = TwoInputs().eval()
    given: Any = inputs
    if not as_dict:
        model, given = Positional(model).eval(), (inputs["image"], inputs["side"])
    report = export_onnx(model, tmp_path / "two.onnx", given)
    assert report.notes == (("argument scale is fixed: 0.5",) if as_dict else ())
    graph = onnx.load(tmp_path / "two.onnx").graph
    assert [entry.name for entry in graph.input] == ["image", "side"]
    assert [entry.name for entry in graph.output] == ["sum", "parts_0", "parts_1"]


class Positional(nn.Module):
    """Calls a model that wants keywords with positional arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor, side: torch.Tensor) -> Any:
        return self.model(image, side=side)


def test_statistics_of_the_batch_are_refused_with_the_layer_names(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    with pytest.raises(BnconvertError, match=r"^1: normalises with the statistics of each batch"):
        export_onnx(net, tmp_path / "net.onnx", IMAGES)
    assert not list(tmp_path.iterdir())


class Eigenvalues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torch.linalg.eigvals(x).real
        return values


class FixedBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1)


class BatchLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x.permute(3, 0, 1, 2))
        return y


class GivesItsInput(nn.Module):
    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return image, image * 2


def test_an_input_that_is_an_output_keeps_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export_onnx(GivesItsInput().eval(), tmp_path / "net.onnx", IMAGES)
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert [entry.name for entry in (*graph.input, *graph.output)] == [
        "image",
        "output_0",
        "output_1",
    ]
    assert capfd.readouterr() == ("", "")


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


class NotFinite(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("resnet18", IMAGES, r"model: is a str; pass a torch.nn.Module"),
        (make_net, None, r"no timm configuration"),
        (make_net, 3, r"example_inputs: .* got int"),
        (make_net, (), r"holds no tensor"),
        (make_net, IMAGES[:0], r"holds no values"),
        (make_net, torch.randn(2, 5, 12, 12), r"does not run with batch size 1: .*3 channels"),
        (make_net, (IMAGES, IMAGES), r"does not run"),
        (
            lambda: nn.Sequential(nn.Identity(), Eigenvalues()),
            torch.randn(2, 3, 3),
            r"^1: aten.linalg_eig has no translation .*test_export_onnx.py",
        ),
        (
            Attends,
            torch.randn(2, 5, 4),
            r"^model: aten.scaled_dot_product_attention is not .*only 4D .*test_export_onnx.py",
        ),
        (FixedBatch, torch.randn(2, 3, 4), r"capture: the model fixes a dimension"),
        (BatchLast, IMAGES.permute(1, 2, 3, 0), r"^dynamic_batch: .*with dynamic_batch=False$"),
        (NotFinite, IMAGES, r"not finite"),
    ],
)
def test_bad_input_gets_one_line_and_writes_nothing(
    tmp_path: Path, model: Any, inputs: Any, message: str
) -> None:
    if not isinstance(model, str):
        model = model()
    with pytest.raises(BnconvertError, match=message) as error:
        export_onnx(model, tmp_path / "net.onnx", inputs)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BnconvertError, match="is a script; export the module"):
        export_onnx(torch.jit.script(make_net()), tmp_path / "net.onnx", IMAGES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, r"is a folder"),
        (lambda folder: folder / "no" / "net.onnx", r"there is no folder"),
        (lambda folder: folder / "taken.onnx", r"exists; pass overwrite=True"),
    ],
)
def test_bad_destination_is_refused_before_any_work(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    taken = tmp_path / "taken.onnx"
    taken.write_bytes(b"old")
    with pytest.raises(BnconvertError, match=message):
        export_onnx(nn.Identity(), make(tmp_path))
    assert taken.read_bytes() == b"old"


def test_overwrite_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")
    export_onnx(make_net(), path, IMAGES, overwrite=True)
    onnx.checker.check_model(str(path))
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    import os

    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_difference_above_the_tolerance_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")
    with pytest.raises(VerificationError, match=r"differs by .* accepted is 0.0e\+00"):
        export_onnx(make_net(), path, IMAGES, tolerance=0.0, overwrite=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("opset", [18, 21, 25, 26, onnx.defs.onnx_opset_version()])
def test_opset_is_the_one_asked_for(tmp_path: Path, opset: int) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.GELU(), nn.LayerNorm(4)).eval()
    randomize_batchnorm(net)
    report = export_onnx(net, tmp_path / "m.onnx", torch.randn(2, 6), opset=opset)
    assert report.opset == opset
    (entry,) = onnx.load(tmp_path / "m.onnx").opset_import
    assert entry.version == opset


@pytest.mark.parametrize("opset", [0, onnx.defs.onnx_opset_version() + 1, "18"])
def test_opset_that_onnx_does_not_know_is_refused(tmp_path: Path, opset: Any) -> None:
    with pytest.raises(BnconvertError, match=f"^opset: {opset!r} is not known"):
        export_onnx(make_net(), tmp_path / "m.onnx", IMAGES, opset=opset)
    assert not list(tmp_path.iterdir())


def test_two_exports_give_the_same_bytes(tmp_path: Path) -> None:
    net = make_net()
    for name in ("a", "b"):
        export_onnx(copy.deepcopy(net), tmp_path / name, IMAGES)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes_are_stored_in_float32_and_said(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    net = make_net().to(dtype)
    report = export_onnx(net, tmp_path / "net.onnx", IMAGES.to(dtype))
    assert any("float32" in note for note in report.notes)
    twin = copy.deepcopy(net).float()
    assert bnconvert.compare(twin, tmp_path / "net.onnx", IMAGES).largest_difference < 1e-5
