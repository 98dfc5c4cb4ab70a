"""Recalibration: statistics of the pooled data, on every rank, or nothing at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from torch import nn

import bnconvert as bc
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPES = {"1d": (5,), "1d with length": (5, 7), "2d": (5, 4, 3), "3d": (5, 2, 3, 2)}
LAYERS = {
    "1d": nn.BatchNorm1d,
    "1d with length": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}


def samples(count: int, *shape: int, mean: float = 1e4, sd: float = 1.0) -> torch.Tensor:
    """Sorted, so that every batch has another mean."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return (mean + sd * noise).sort(0).values.float()


def split(values: torch.Tensor, sizes: Any) -> list[torch.Tensor]:
    return list(torch.split(values, sizes))


def assert_pooled(layer: Any, values: torch.Tensor, tolerance: float = 1e-6) -> None:
    dims = [dim for dim in range(values.ndim) if dim != 1]
    var, mean = torch.var_mean(values.double(), dim=dims)
    assert float((layer.running_mean.double() / mean - 1).abs().max()) < tolerance
    assert float((layer.running_var.double() / var - 1).abs().max()) < tolerance


def everything(model: nn.Module) -> tuple[Any, ...]:
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [module.training for module in model.modules()],
        [len(module._forward_pre_hooks) for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
    )


def assert_as_before(model: nn.Module, before: tuple[Any, ...]) -> None:
    after = everything(model)
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    assert after[1:] == before[1:]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("mean", "sd"), [(0.5, 2.0), (1e4, 1.0)])
def test_one_layer_gets_the_statistics_of_the_pooled_data(
    kind: str, mean: float, sd: float
) -> None:
    layer, values = LAYERS[kind](5), samples(101, *SHAPES[kind], mean=mean, sd=sd)
    buffers = (layer.running_mean, layer.running_var)
    bc.recalibrate_batchnorm(layer, split(values, [40, 1, 57, 3]))
    assert_pooled(layer, values)
    assert (layer.running_mean, layer.running_var) == buffers  # in place
    assert layer.num_batches_tracked == 0


def test_every_layer_of_a_network_gets_the_statistics_of_its_eval_inputs_in_one_pass() -> None:
    model = timm.create_model("resnet18", num_classes=3).train()
    randomize_batchnorm(model)
    batches = split(samples(12, 3, 32, 32, mean=0.5), [5, 4, 3])
    passes = 0

    def loader() -> Iterator[torch.Tensor]:
        nonlocal passes
        passes += 1
        yield from batches

    report = bc.recalibrate_batchnorm(model, loader())
    assert passes == 1
    assert report.count(bc.Outcome.REWRITTEN) == 20
    assert all(module.training for module in model.modules())
    seen: dict[nn.Module, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda m, a: seen.update({m: a[0]}))
    model.eval()(torch.cat(batches))
    for module, values in seen.items():
        var, mean = torch.var_mean(values.double(), dim=(0, 2, 3))
        assert isinstance(module, nn.BatchNorm2d)
        torch.testing.assert_close(module.running_mean, mean.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(module.running_var, var.float(), rtol=1e-4, atol=1e-4)


def test_mean_of_batches_is_the_average_of_the_batches_own_statistics() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    randomize_batchnorm(model)
    batches = split(samples(30, 5, mean=3.0).double(), [10, 15, 5])
    expected: list[list[Any]] = [[], []]
    for batch in batches:
        model.train()
        model[0].momentum = model[2].momentum = 1.0
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(batch)
        for place, layer in enumerate((model[0], model[2])):
            expected[place].append((layer.running_mean.clone(), layer.running_var.clone()))
        model.load_state_dict(state)
    bc.recalibrate_batchnorm(model, batches, estimator="mean_of_batches")
    for place, layer in enumerate((model[0], model[2])):
        means, variances = (
            torch.stack(list(x)).mean(0) for x in zip(*expected[place], strict=True)
        )
        torch.testing.assert_close(layer.running_mean, means)
        torch.testing.assert_close(layer.running_var, variances)


class Heads(nn.Module):
    """A shared layer on two inputs, and a second one behind it, as in a detection head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.second(self.mix(self.first(x * scale)).sigmoid()) for scale in (1.0, 5.0)]
        return torch.cat(levels)


def test_a_layer_that_is_called_twice_counts_both_calls_and_later_layers_see_the_result() -> None:
    model = Heads().double()
    values = samples(40, 4, mean=2.0).double()
    bc.recalibrate_batchnorm(model, split(values, [25, 15]))
    assert_pooled(model.first, torch.cat([values, 5 * values]), 1e-12)
    hidden = model.mix(model.eval().first(torch.cat([values, 5 * values]))).sigmoid()
    assert_pooled(model.second, hidden.detach(), 1e-9)


class OwnOutput(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.between = nn.BatchNorm1d(4, affine=False), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.between(self.norm(x)))
        return output


def test_a_layer_fed_by_its_own_output_comes_to_rest_or_says_that_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = samples(40, 4, mean=2.0).double()
    model = OwnOutput(lambda x: (0.3 * x + 1).square()).double()
    report = bc.recalibrate_batchnorm(model, split(values, [25, 15]))
    inner = (model.eval().norm(values) * 0.3 + 1).square()
    assert_pooled(model.norm, torch.cat([values, inner]), 1e-9)
    assert "fed by its own output" not in str(report)
    monkeypatch.setattr("bnconvert.recalibration.population._PASSES_TO_REST", 1)
    assert "fed by its own output" in str(
        bc.recalibrate_batchnorm(OwnOutput(lambda x: 2 * x + 1), [values.float()])
    )


class MakesTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.devices: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.devices.add(torch.zeros(1).device.type)
        output: torch.Tensor = self.norm(x)
        return output


def test_batches_run_under_the_default_device_of_the_caller() -> None:
    model, values = MakesTensors(), samples(8, 4)
    with torch.device("meta"):
        bc.recalibrate_batchnorm(model, [values])
    assert model.devices == {"meta"}


def test_arguments_of_another_kind_are_refused_by_name() -> None:
    values = samples(8, 4)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loader": 5}, "loader: expected batches to iterate over, got 5"),
        ({"device": "gpu"}, "device: torch knows no 'gpu'"),
        ({"num_batches": "2"}, "num_batches: is '2'"),
        ({"loader": values}, r"loader: is one tensor; .* tensor\.split"),
        ({"forward": "model"}, "forward: expected a function or None, got 'model'"),
        ({"progress": 1}, "progress: expected a function or None, got 1"),
        ({"process_group": [0]}, r"process_group: torch\.distributed is not initialized"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "device: cuda cannot be")]),
    ]
    for changes, message in cases:
        arguments: dict[str, Any] = {"loader": [values], **changes}
        with pytest.raises(bc.BnconvertError, match=message):
            bc.recalibrate_batchnorm(nn.BatchNorm1d(4), **arguments)


def test_statistics_made_in_inference_mode_are_refused_and_other_tensors_are_not() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(bc.BnconvertError, match=r"1: its statistics were made in torch\.infer"):
        bc.recalibrate_batchnorm(model, [samples(4, 3)])
    bc.recalibrate_batchnorm(nn.Sequential(model[0], nn.BatchNorm1d(3)), [samples(4, 3)])


def test_a_model_that_does_not_run_on_a_batch_is_named_with_what_it_said() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    with pytest.raises(bc.BnconvertError, match=r"on a batch of shape \(8, 4\) .*not implemented"):
        bc.recalibrate_batchnorm(model, [samples(8, 4).to(torch.uint8)])


def test_frozen_layers_and_dropout_are_left_alone_and_reported() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.9), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    bc.freeze_batchnorm(model, include="0")
    bc.freeze_batchnorm(model, include="3", stats=False)
    frozen = {name: tensor.clone() for name, tensor in model[0].state_dict().items()}
    values = samples(50, 4, mean=2.0)
    report = bc.recalibrate_batchnorm(model.train(), split(values, 10))
    assert all(torch.equal(model[0].state_dict()[n], t) for n, t in frozen.items())
    assert_pooled(model[2], model[0](values))
    assert model[1].training
    assert [(layer.name, layer.reason) for layer in report.left] == [
        ("0", "its statistics are frozen")
    ]
    assert report.count(bc.Outcome.REWRITTEN) == 2


def test_unreached_and_statless_layers_are_left_with_a_reason() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4))
    model.register_module("spare", nn.BatchNorm1d(4))
    report = bc.recalibrate_batchnorm(
        model,
        split(samples(9, 4), 3),
        forward=lambda m, batch: m.get_submodule("1")(m.get_submodule("0")(batch)),
    )
    reasons = {layer.name: layer.reason for layer in report.left}
    assert "track_running_stats=False" in reasons["0"]
    assert reasons["spare"] == "the forward pass does not call it"


def test_the_report_says_how_far_the_statistics_moved() -> None:
    layer = nn.BatchNorm1d(4)
    report = bc.recalibrate_batchnorm(layer, [samples(1000, 4, mean=3.0, sd=2.0)])
    (shift,) = report.shifts
    assert 2.5 < shift.mean < 3.5
    assert 3.0 < shift.variance_low <= shift.variance_high < 5.0
    assert "3." in str(report)
    assert report.to_dict()["shifts"][0]["name"] == ""


def failing(after: int) -> Iterator[torch.Tensor]:
    yield from split(samples(after * 4, 4), 4)
    raise OSError("disk gone")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) == 7.0:
            raise RuntimeError("cannot take this")
        y: torch.Tensor = self.norms(x)
        if float(x[0, 0]) == 8.0:
            raise RuntimeError("fails behind the layers")
        return y


def marked(value: float) -> list[torch.Tensor]:
    batches = list(split(samples(12, 4), 4))
    batches[1] = torch.full((4, 4), value)
    return batches


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "has no batch"),
    "short": (split(samples(12, 4), 4), {"num_batches": 4}, "has 3 batches but num_batches is 4"),
    "zero batches asked": (split(samples(12, 4), 4), {"num_batches": 0}, "at least 1"),
    "unknown estimator": (split(samples(12, 4), 4), {"estimator": "ema"}, "'ema'"),
    "one value": ([torch.ones(1, 4)], {}, "got 1 values"),
    "not finite": (marked(float("nan")), {}, "channel 0 is nan"),
    "not a tensor": ([{"image": 1}], {}, "pass forward="),
    "loader fails": (failing(2), {}, "disk gone"),
    "forward fails": (marked(7.0), {}, "cannot take this"),
    "forward fails late": (marked(8.0), {}, "fails behind"),
}


@pytest.mark.parametrize("estimator", ["population", "mean_of_batches"])
@pytest.mark.parametrize("case", BAD)
def test_after_any_failure_the_model_is_as_before(case: str, estimator: str) -> None:
    loader, options, message = BAD[case]
    if case == "loader fails":
        loader = failing(2)
    model = Fragile()
    randomize_batchnorm(model)
    model.norms[1].eval()
    before = everything(model)
    with pytest.raises((bc.BnconvertError, OSError, RuntimeError), match=message):
        bc.recalibrate_batchnorm(model, loader, **{"estimator": estimator, **options})
    assert_as_before(model, before)


def test_an_overflow_in_the_layers_own_dtype_is_an_error() -> None:
    layer = nn.BatchNorm1d(4).half()
    with pytest.raises(bc.BnconvertError, match=r"variance of channel 0 is inf in torch\.float16"):
        bc.recalibrate_batchnorm(layer, [samples(9, 4, mean=0.0, sd=1e4).half()])
    assert torch.equal(layer.running_var, torch.ones(4).half())  # type: ignore[arg-type]


def test_num_batches_takes_no_more_than_it_was_asked_for() -> None:
    layer, values = nn.BatchNorm1d(4), samples(40, 4)
    iterator = iter(split(values, 10))
    bc.recalibrate_batchnorm(layer, iterator, num_batches=3)
    assert_pooled(layer, values[:30])
    assert len(list(iterator)) == 1


def test_tuples_dicts_and_compiled_models_are_taken() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    values = samples(20, 4)
    bc.recalibrate_batchnorm(model, [(values, torch.zeros(20))])
    assert_pooled(model[0], values)
    compiled: Any = torch.compile(model, backend="eager")
    bc.recalibrate_batchnorm(compiled, [{"x": values + 9}], forward=lambda m, b: m(b["x"]))
    assert_pooled(model[0], values + 9)


def test_progress_is_told_layer_by_layer() -> None:
    told: list[tuple[int, int]] = []
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    bc.recalibrate_batchnorm(
        model, split(samples(8, 4), 4), progress=lambda done, total: told.append((done, total))
    )
    assert told == [(1, 2), (2, 2)]
