"""Folding models that are wrapped, cached, closed over, cast, or otherwise out of the ordinary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bnconvert import BnconvertError, fold_batchnorm, plan_fold_batchnorm
from bnconvert.errors import VerificationError
from bnconvert.fold import FoldReport, plan_fold_exported
from bnconvert.fold.mirror import mirror
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import check_folds, conv_bn, image


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        randomize_batchnorm(self)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x))


class Nested(Plain):
    def forward(self, a: Any, options: Any) -> Any:  # type: ignore[override]
        return {"y": self.bn(self.conv(a[0] + options["x"])), "z": a[1]}


class Cached(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        if "ones" not in self.cache:
            self.cache["ones"] = torch.ones(4, 1, 1)
        return self.bn(self.conv(x)) + self.cache["ones"]


class Closed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Any] = [self.conv, self.bn]
        self.run = lambda x: self.layers[1](self.layers[0](x))

    def forward(self, x: Tensor) -> Any:
        return self.run(x)  # type: ignore[no-untyped-call]


class Cast(Plain):
    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x)).float()
        return torch.softmax(y, 1, dtype=torch.float32) + torch.ones(4, 1, 1, dtype=torch.float32)


class Uncopyable(Plain):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("cannot be copied")


def compiled() -> Any:
    return torch.compile(Plain(), backend="eager")


def compiled_in_place() -> nn.Module:
    model = Plain()
    model.conv.compile(backend="eager")
    return model


def data_parallel() -> nn.Module:
    return nn.DataParallel(Plain())


@pytest.mark.parametrize(
    "make", [Cached, Closed, Cast, Uncopyable, compiled, compiled_in_place, data_parallel]
)
def test_it_is_folded_all_the_same(make: Any) -> None:
    model = make().eval()
    x = image()
    with torch.no_grad():
        expected = model(x)
        assert fold_batchnorm(model, x) is model
        torch.testing.assert_close(model(x), expected)
    assert any(type(module) is nn.Identity for module in model.modules())
    if make is Cached:
        assert model.cache["ones"].dtype is torch.float32


def test_nested_inputs_positional_and_by_keyword() -> None:
    x = image()
    for inputs in (((x, x + 1), {"x": x}), {"a": (x, x + 1), "options": {"x": x}}):
        model = Nested().eval()
        with torch.no_grad():
            expected = model((x, x), {"x": x})["y"]
            fold_batchnorm(model, inputs)
            torch.testing.assert_close(model((x, x), {"x": x})["y"], expected)
        assert "BatchNorm" not in str(model)


def test_a_lazy_layer_is_refused_before_it_gets_weights() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d()).eval()
    with pytest.raises(BnconvertError, match=r"0\.weight is not initialized; run the model once"):
        fold_batchnorm(model, image())
    assert model[0].has_uninitialized_params()  # type: ignore[operator]


def test_a_norm_in_an_autocast_block_is_left() -> None:
    class Autocast(Plain):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.bn(self.conv(x)).float()

    report = plan_fold_batchnorm(Autocast().eval(), image()).report
    assert "autocast block" in report.left[0].reason


@pytest.mark.parametrize("nested", [False, True])
def test_traced_models_are_folded(nested: bool) -> None:
    traced = torch.fx.symbolic_trace(conv_bn())
    check_folds(nn.Sequential(traced, nn.Sigmoid()) if nested else traced, image())


def test_a_captured_graph_is_referred_to_fold_exported() -> None:
    graph = torch.export.export(conv_bn(), (image(),)).module()
    with pytest.raises(BnconvertError, match=r"the model is a captured graph.* give fold_exported"):
        fold_batchnorm(graph, image())


def test_folding_within_autocast_drops_the_weights_that_it_has_cast() -> None:
    torch.manual_seed(0)
    model, x = conv_bn(), image()
    with torch.no_grad():
        wanted = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)  # with gradients, so that autocast keeps what it has cast
        fold_batchnorm(model, x)
        torch.testing.assert_close(model(x).float(), wanted, rtol=0.05, atol=0.05)


def test_quantised_weights_are_left() -> None:
    class Quantised(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 127, (4, 6), dtype=torch.int8))
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return self.bn(nn.functional.linear(x, self.weight.float() / 127))

    report = plan_fold_batchnorm(Quantised().eval(), torch.randn(5, 6)).report
    assert "the weight of linear is quantised" in report.left[0].reason


def test_a_norm_alone_is_left() -> None:
    report = plan_fold_batchnorm(nn.BatchNorm2d(6).eval(), image()).report
    assert report.left[0].name == ""
    with pytest.raises(BnconvertError, match=r"expected a torch.nn.Module|ExportedProgram"):
        fold_batchnorm(image(), image())  # type: ignore[type-var]


class Magnifies(nn.Module):
    """Takes the differences between two inputs times about 1.6, over and over."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.conv, self.bn, self.times = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), times
        randomize_batchnorm(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(self.conv(x)).sigmoid()
        for _ in range(self.times):
            y = 3.9 * y * (1 - y)
        return y


def test_a_model_that_magnifies_rounding_is_measured_by_what_it_does_to_its_last_bit() -> None:
    """A mistake in the norm still shows: in such a model it is of the size of the values."""
    torch.manual_seed(0)
    model = Magnifies(33).eval()
    program = torch.export.export(model, (image(),))
    for plan in (plan_fold_batchnorm(model, image()), plan_fold_exported(program)):
        assert isinstance(plan.report, FoldReport)
        assert plan.report.proof is not None
        assert 1e-9 < plan.report.proof.float64 < 1e-6
    with pytest.raises(VerificationError, match="where 1e-06 is allowed; the first layer"):
        plan_fold_batchnorm(Magnifies(60).eval(), image())


def test_a_mirror_shares_no_tensor_and_keeps_sharing_inside() -> None:
    torch.manual_seed(0)
    model = Closed()
    model.again = model.conv
    twin = mirror(model, torch.float64)
    assert twin.layers[0] is twin.conv is twin.again
    assert twin.conv is not model.conv
    pointers = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not pointers & {tensor.data_ptr() for tensor in twin.state_dict().values()}
    assert all(t.dtype is torch.float64 for t in twin.parameters())
    assert all(t.dtype is torch.float32 for t in model.parameters())
    x = image()
    torch.testing.assert_close(twin.eval()(x.double()).float(), model.eval()(x))
