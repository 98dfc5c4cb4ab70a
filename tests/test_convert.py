"""Conversion keeps everything about a model but the classes of its norm layers."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import bnconvert
from bnconvert import (
    BnconvertError,
    Outcome,
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    is_synchronized,
    plan_convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from bnconvert.testing import randomize_batchnorm


class Subclass(nn.BatchNorm2d):
    """Changes nothing that matters."""


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class OwnCall(nn.BatchNorm2d):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return -super().__call__(*args, **kwargs)


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Rich(nn.Module):
    """Shares layers in every way that people do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.same_parent = self.norm
        self.branch = nn.Sequential(self.norm, nn.ReLU(), Subclass(4))
        self.by_name = nn.ModuleDict({"a": nn.BatchNorm2d(4), "b": nn.BatchNorm2d(4)})
        self.plain_list = [self.norm, self.by_name["a"]]
        self.norm.note = "mine"  # type: ignore[assignment]
        self.norm.register_buffer("extra", torch.ones(2), persistent=False)
        self.by_name["b"].eval()
        self.by_name["a"].weight.requires_grad_(False)
        self.by_name["b"].half()

    def forward(self, x: Tensor) -> Tensor:
        x = self.by_name["a"](self.branch(self.norm(self.conv(x))))
        result: Tensor = self.plain_list[0](x)
        return result


def facts(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that conversion has to keep."""
    return {
        "modules": [(name, id(m)) for name, m in model.named_modules(remove_duplicate=False)],
        "parameters": [
            (n, id(p), p.requires_grad, p.dtype, p.device)
            for n, p in model.named_parameters(remove_duplicate=False)
        ],
        "buffers": [
            (n, id(b), b.dtype, b.device) for n, b in model.named_buffers(remove_duplicate=False)
        ],
        "training": [m.training for m in model.modules()],
        "persistent": [set(m._non_persistent_buffers_set) for m in model.modules()],
        "state": list(model.state_dict()),
        "metadata": copy.deepcopy(model.state_dict()._metadata),  # type: ignore[attr-defined]
        "hooks": [
            (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks))
            for m in model.modules()
        ],
        "attributes": [sorted(set(m.__dict__) - {"_bnconvert_group"}) for m in model.modules()],
    }


def test_everything_but_the_class_stays_and_revert_gives_the_exact_class_back() -> None:
    model = Rich()
    randomize_batchnorm(model)
    calls: list[str] = []
    model.norm.register_forward_hook(lambda *_: calls.append("hook"))
    model.norm.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.norm.register_full_backward_hook(lambda *_: calls.append("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2, 3, 5, 5)
    model(x).square().sum().backward()
    optimizer.step()
    before, types = facts(model), [type(m) for m in model.modules()]
    keys = [sorted(m.__dict__) for m in model.modules()]

    assert convert_sync_batchnorm(model) is model
    assert facts(model) == before
    assert isinstance(model.norm, SyncBatchNorm2d)
    assert model.plain_list[0] is model.norm is model.same_parent is model.branch[0]
    assert is_synchronized(model)
    assert {type(m).__name__ for m in model.branch} == {"SyncBatchNorm2d", "ReLU", "SyncSubclass"}
    assert all(isinstance(m, old) for m, old in zip(model.modules(), types, strict=True))
    calls.clear()
    model(x).square().sum().backward()
    assert {"hook", "pre", "backward"} <= set(calls)
    optimizer.step()

    assert revert_sync_batchnorm(model) is model
    assert facts(model) == before
    assert [type(m) for m in model.modules()] == types
    assert [sorted(m.__dict__) for m in model.modules()] == keys
    assert not is_synchronized(model)


def test_eval_output_is_unchanged_bit_for_bit_with_timm_activations() -> None:
    model = timm.create_model("densenet121", num_classes=5).eval()
    randomize_batchnorm(model)
    x = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        before = model(x)
        convert_sync_batchnorm(model)
        assert torch.equal(model(x), before)
        torch_convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        theirs = torch_convert(copy.deepcopy(model))
        assert not torch.allclose(theirs(x), before), "torch's converter used to drop activations"
        revert_sync_batchnorm(model)
        assert torch.equal(model(x), before)


def test_converting_twice_equals_once() -> None:
    model = convert_sync_batchnorm(Rich())
    types = [type(m) for m in model.modules()]
    plan = plan_convert_sync_batchnorm(model)
    assert plan.report.count(Outcome.CONVERTED) == 0
    assert all("already" in layer.reason for layer in plan.report.left)
    plan.apply()
    assert [type(m) for m in model.modules()] == types


def test_planning_changes_nothing_and_shows_every_name() -> None:
    model = Rich()
    types = [type(m) for m in model.modules()]
    before = facts(model)
    plan = plan_convert_sync_batchnorm(model)
    assert [type(m) for m in model.modules()] == types
    assert facts(model) == before
    names = {layer.name: layer.outcome for layer in plan.report.layers}
    assert names == {
        "norm": Outcome.CONVERTED,
        "same_parent": Outcome.SHARED,
        "branch.0": Outcome.SHARED,
        "branch.2": Outcome.CONVERTED,
        "by_name.a": Outcome.CONVERTED,
        "by_name.b": Outcome.CONVERTED,
    }
    assert "the same layer as norm" in str(plan)


class BatchRenorm2d(nn.Module):
    """Named like a BatchNorm, with statistics under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_avg_mean", torch.zeros(3))


@pytest.mark.parametrize(
    "unknown",
    [OwnForward(3), OwnCall(3), HandWritten(), timm.layers.EvoNorm2dB0(3), BatchRenorm2d()],
)
def test_unknown_layers_raise_all_named_and_nothing_is_converted(unknown: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), unknown, nn.ModuleDict({"x": copy.deepcopy(unknown)}))
    with pytest.raises(BnconvertError, match=r"2 unknown.*1: .*2\.x: ") as caught:
        convert_sync_batchnorm(model)
    assert type(unknown).__name__ in str(caught.value)
    assert not is_synchronized(model)
    convert_sync_batchnorm(model, exclude=["1", "2.*"])
    assert is_synchronized(model[0])
    report = plan_convert_sync_batchnorm(model, on_unknown="skip").report
    assert [layer.name for layer in report.left] == ["0", "1", "2.x"]


def test_a_forward_replaced_on_the_instance_is_unknown() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    model[0].forward = lambda x: x
    with pytest.raises(BnconvertError, match="0: its forward was replaced"):
        convert_sync_batchnorm(model)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:FutureWarning")
def test_layers_of_other_kinds_are_left_with_the_reason() -> None:
    from torchvision.ops import FrozenBatchNorm2d  # type: ignore[import-untyped]

    class InPlaceABN(nn.Module):
        pass

    model = nn.ModuleDict(
        {
            "lazy": nn.LazyBatchNorm2d(),
            "scripted": torch.jit.script(nn.BatchNorm2d(3)),
            "scripted_model": torch.jit.script(
                nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
            ),
            "torch": nn.SyncBatchNorm(3),
            "frozen": FrozenBatchNorm2d(3),
            "timm_frozen": timm.layers.FrozenBatchNormAct2d(3),
            "ours_frozen": bnconvert.FrozenBatchNorm2d(3),
            "in_place": InPlaceABN(),
            "instance": nn.InstanceNorm2d(3, track_running_stats=True),
            "group": nn.GroupNorm(1, 3),
            "exported": torch.export.export(
                nn.Sequential(nn.BatchNorm2d(3)).eval(), (torch.zeros(2, 3, 2, 2),)
            ).module(),
        }
    )
    types = [type(m) for m in model.modules()]
    report = plan_convert_sync_batchnorm(model).report
    reasons = {layer.name: layer.reason for layer in report.left}
    expected = set(model) - {"instance", "group", "scripted_model"} | {"scripted_model.1"}
    assert set(reasons) == expected
    assert all(reasons.values())
    convert_sync_batchnorm(model)
    assert [type(m) for m in model.modules()] == types


def test_an_exported_program_and_other_objects_are_refused() -> None:
    program = torch.export.export(nn.BatchNorm2d(3).eval(), (torch.zeros(2, 3, 2, 2),))
    with pytest.raises(BnconvertError, match="ExportedProgram"):
        convert_sync_batchnorm(program)  # type: ignore[type-var]
    with pytest.raises(BnconvertError, match=r"expected a torch\.nn\.Module, got dict"):
        convert_sync_batchnorm({})  # type: ignore[type-var]


def test_a_batchnorm_as_the_whole_model() -> None:
    layer = nn.BatchNorm3d(3)
    assert plan_convert_sync_batchnorm(layer).report.layers[0].name == ""
    assert type(convert_sync_batchnorm(layer)) is bnconvert.SyncBatchNorm3d
    assert type(revert_sync_batchnorm(layer)) is nn.BatchNorm3d


@pytest.mark.parametrize(
    ("include", "exclude", "converted"),
    [
        ("by_name.*", None, ["by_name.a", "by_name.b"]),
        (["branch.0"], None, ["norm"]),
        (None, ["norm", "by_name.?"], ["branch.2"]),
        (lambda name, module: isinstance(module, Subclass), None, ["branch.2"]),
        ("by_name.*", lambda name, module: name.endswith("a"), ["by_name.b"]),
    ],
)
def test_include_and_exclude(include: Any, exclude: Any, converted: list[str]) -> None:
    report = plan_convert_sync_batchnorm(Rich(), include=include, exclude=exclude).report
    found = [layer.name for layer in report.layers if layer.outcome is Outcome.CONVERTED]
    assert found == converted
    assert all(layer.reason for layer in report.left)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_whole_converted_models_are_copied_and_stored(way: str) -> None:
    model = convert_sync_batchnorm(Rich())
    randomize_batchnorm(model)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))  # noqa: S301 (made here)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert other.plain_list[0] is other.norm
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(other.eval()(x), model.eval()(x))
    revert_sync_batchnorm(other)
    assert type(other.branch[2]) is Subclass


def test_a_reverted_model_unpickles_where_bnconvert_is_not_installed() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3), timm.layers.BatchNormAct2d(3))
    convert_sync_batchnorm(model)
    revert_sync_batchnorm(model, example_inputs=torch.zeros(2, 3, 2, 2))
    program = (
        "import sys, pickle; sys.modules['bnconvert'] = None; "
        "model = pickle.loads(sys.stdin.buffer.read()); "
        "print([type(m).__name__ for m in model])"
    )
    done = subprocess.run(  # noqa: S603 (this interpreter)
        [sys.executable, "-c", program], input=pickle.dumps(model), capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == "['BatchNorm2d', 'BatchNorm2d', 'BatchNormAct2d']"


@pytest.mark.parametrize(
    "change", [convert_sync_batchnorm, revert_sync_batchnorm, bnconvert.freeze_batchnorm]
)
def test_patterns_that_match_nothing_or_are_none_are_refused(change: Any) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    with pytest.raises(
        BnconvertError, match=r"^include: 'layer9\.\*', 'bn' matches none of the 2 "
    ):
        change(model, include=["layer9.*", "bn"])
    for wrong in (5, [5], ["0", None]):
        with pytest.raises(BnconvertError, match=r"^exclude: expected fnmatch patterns"):
            change(model, exclude=wrong)
    assert [type(m) for m in model] == [nn.BatchNorm2d, nn.ReLU, nn.BatchNorm2d]
    change(nn.Sequential(nn.ReLU()), include="layer9.*")
    change(model, include=lambda name, _: name == "9")
    for patterns in ({"include": ["0", "layer9.*"]}, {"include": "0", "exclude": "layer9.*"}):
        with pytest.warns(UserWarning, match=r"clude: 'layer9\.\*' matches none of the 2 ") as said:
            change(model, **patterns)
        assert len(said) == 1


def test_a_failure_in_the_middle_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(3)))
    plan = plan_convert_sync_batchnorm(model)
    model[2].__class__ = Subclass
    keys = [sorted(m.__dict__) for m in model]
    with pytest.raises(BnconvertError, match="2: is a Subclass now but was a BatchNorm2d"):
        plan.apply()
    assert [type(m).__name__ for m in model] == ["BatchNorm2d", "BatchNorm2d", "Subclass"]
    assert [sorted(m.__dict__) for m in model] == keys
    model[2].__class__ = nn.BatchNorm2d
    plan.apply()
    with pytest.raises(BnconvertError, match="applied already"):
        plan.apply()


def test_compiled_models_are_converted_and_compile_again() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    randomize_batchnorm(model)
    compiled: Any = torch.compile(model, backend="eager")
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        before = compiled(x)
        convert_sync_batchnorm(compiled)
        assert is_synchronized(model)
        assert torch.equal(compiled(x), before)
