"""Classes and methods that users and torch put on single layers, before and after conversion."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import bnconvert
from bnconvert import (
    BnconvertError,
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    is_synchronized,
    revert_sync_batchnorm,
)
from bnconvert.testing import randomize_batchnorm
from tests.test_convert import Subclass


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_subclass_made_in_a_function_or_a_cell_stays_a_base() -> None:
    class MyBatchNorm2d(nn.BatchNorm2d):
        @functools.lru_cache  # noqa: B019 (hides the use of super)
        def extra_repr(self) -> str:
            text: str = super().extra_repr()  # type: ignore[no-untyped-call]
            return text + ", mine"

    namespace: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
    cell = "class CellBatchNorm2d(nn.BatchNorm2d):\n  pass"
    exec(cell, namespace)  # noqa: S102 (a notebook cell, run twice)
    first = namespace["CellBatchNorm2d"]
    exec(cell, namespace)  # noqa: S102
    made = type("ExtraBatchNorm2d", (nn.BatchNorm2d,), {"__module__": "somewhere"})
    classes = [MyBatchNorm2d, first, made]
    model = nn.Sequential(*(cls(3) for cls in classes))
    convert_sync_batchnorm(model)
    assert all(is_synchronized(m) for m in model)
    assert all(isinstance(m, cls) for m, cls in zip(model, classes, strict=True))
    assert model[0].extra_repr().endswith(", mine")
    bnconvert.freeze_batchnorm(model)
    assert all(isinstance(m, cls) for m, cls in zip(model, classes, strict=True))
    assert model[0].extra_repr().endswith(", mine")
    revert_sync_batchnorm(bnconvert.unfreeze_batchnorm(model))
    assert [type(m) for m in model] == classes


class OwnNames(nn.BatchNorm2d):
    """Uses names that a converter could want for itself."""

    prefix = "mine"
    finish = "mine"
    fused_activation = "mine"
    _check_channels = "mine"

    @property
    def process_group(self) -> str:
        return "mine"


@pytest.mark.parametrize("change", [convert_sync_batchnorm, bnconvert.freeze_batchnorm])
def test_names_of_a_subclass_are_not_shadowed(change: Any) -> None:
    names = ("prefix", "finish", "fused_activation", "_check_channels", "process_group")
    layer: Any = OwnNames(3)
    expected = layer.eval()(torch.ones(1, 3, 2, 2))
    change(layer)
    assert [getattr(layer, name) for name in names] == ["mine"] * 5
    assert torch.equal(layer(torch.ones(1, 3, 2, 2)), expected)
    assert "default group" in str(bnconvert.inspect_batchnorm(convert_sync_batchnorm(OwnNames(3))))


def test_a_forward_replaced_after_conversion_is_refused_by_name_until_it_is_put_back() -> None:
    model: Any = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    convert_sync_batchnorm(model)
    old = model[1].forward
    model[1].forward = lambda x: old(x)
    assert is_synchronized(model[1])
    with pytest.raises(BnconvertError, match=r"1 layers .* were synchronised \(1\); undo that"):
        revert_sync_batchnorm(model)
    with pytest.raises(BnconvertError, match="1: its forward was replaced on the instance"):
        bnconvert.freeze_batchnorm(model)
    assert all(is_synchronized(m) for m in model)
    revert_sync_batchnorm(model, exclude="1")
    model[1].forward = old  # as accelerate's remove_hook_from_module does
    revert_sync_batchnorm(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert model[1].forward.__func__ == nn.BatchNorm2d.forward
    convert_sync_batchnorm(model)
    assert model[1].forward.__func__ == SyncBatchNorm2d.forward
    copied = copy.deepcopy(model)
    assert copied[1].forward.__self__ is copied[1]


@pytest.mark.parametrize("when", ["before", "after", "across"])
def test_parametrizations_come_and_go_around_conversion(when: str) -> None:
    model: Any = nn.Sequential(Subclass(4))
    randomize_batchnorm(model)
    plain = model[0].weight.detach().clone()
    x = torch.randn(2, 4, 3, 3)
    if when != "after":
        parametrize.register_parametrization(model[0], "weight", Twice())
        original = type(model[0])
        expected = model.eval()(x)
    convert_sync_batchnorm(model)
    if when == "after":
        parametrize.register_parametrization(model[0], "weight", Twice())
    assert is_synchronized(model)
    torch.testing.assert_close(model[0].weight, 2 * plain)
    if when == "before":
        assert torch.equal(model.eval()(x), expected)
        revert_sync_batchnorm(model)
        assert type(model[0]) is original
    if when == "after":
        revert_sync_batchnorm(model)
    assert isinstance(copy.deepcopy(model)[0], Subclass)
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    torch.testing.assert_close(model[0].weight, plain)
    revert_sync_batchnorm(model)
    assert type(model[0]) is Subclass


def test_a_deepcopy_of_a_parametrized_layer_is_not_converted_with_it() -> None:
    layer = nn.BatchNorm2d(4)
    parametrize.register_parametrization(layer, "weight", Twice())
    other = copy.deepcopy(layer)
    convert_sync_batchnorm(layer)
    assert is_synchronized(layer)
    assert not is_synchronized(other)


random_unstructured: Any = prune.random_unstructured


remove: Any = prune.remove


def test_pruned_and_spectral_norm_models_convert() -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)
    ).eval()
    randomize_batchnorm(model)
    random_unstructured(model[1], "weight", amount=0.5)
    x = torch.randn(2, 3, 6, 6)
    before = model(x)
    convert_sync_batchnorm(model)
    assert torch.equal(model(x), before)
    remove(model[1], "weight")
    revert_sync_batchnorm(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert torch.equal(model(x), before)


def test_a_timm_layer_takes_its_input_by_the_name_that_timm_gives_it() -> None:
    layer: Any = BatchNormAct2d(3)
    x = torch.randn(2, 3, 4, 4)
    for train, change in ((True, convert_sync_batchnorm), (False, bnconvert.freeze_batchnorm)):
        expected = layer.train(train)(x=x)
        change(layer)
        assert torch.equal(layer(x=x), expected)


def test_a_class_that_cannot_be_subclassed_is_named_and_nothing_is_changed() -> None:
    class Registered(nn.BatchNorm2d):
        def __init_subclass__(cls, *, key: str) -> None:
            super().__init_subclass__()

    model = nn.Sequential(nn.BatchNorm2d(3), Registered(3))
    for change in (convert_sync_batchnorm, bnconvert.freeze_batchnorm):
        with pytest.raises(BnconvertError, match=r"Registered: cannot be subclassed \(.*'key'\)"):
            change(model)
        assert type(model[0]) is nn.BatchNorm2d
        change(model, exclude="1")
        revert_sync_batchnorm(bnconvert.unfreeze_batchnorm(model))
