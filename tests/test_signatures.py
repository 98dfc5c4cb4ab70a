"""Which arguments our layer classes show to `help`, editors and torch's own tools."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import timm
from torch import nn

from bnconvert import (
    FrozenBatchNorm3d,
    SyncBatchNorm2d,
    SyncBatchNormAct2d,
    convert_sync_batchnorm,
)


class Wide(nn.BatchNorm2d):
    def __init__(self, channels: int, process_group: str = "mine", **kwargs: Any) -> None:
        super().__init__(channels, **kwargs)


@pytest.mark.parametrize(
    ("cls", "origin", "own"),
    [
        (SyncBatchNorm2d, nn.BatchNorm2d, {"process_group"}),
        (SyncBatchNormAct2d, timm.layers.BatchNormAct2d, {"process_group"}),
        (FrozenBatchNorm3d, nn.BatchNorm3d, set()),
        (type(convert_sync_batchnorm(Wide(3))), Wide, set()),
    ],
)
def test_the_signature_is_that_of_the_stock_layer(cls: Any, origin: Any, own: set[str]) -> None:
    shown, stock = inspect.signature(cls).parameters, inspect.signature(origin).parameters
    assert shown.keys() - stock.keys() == own
    assert [shown[name] for name in stock] == list(stock.values())


def test_a_subclass_shows_its_own_signature() -> None:
    base: Any = SyncBatchNorm2d

    class Own(base):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__(width)

    assert list(inspect.signature(Own).parameters) == ["width"]


def test_initialization_can_be_skipped() -> None:
    skip: Any = nn.utils.skip_init
    layer = skip(SyncBatchNorm2d, 4)
    assert (layer.weight.device.type, layer.process_group) == ("cpu", None)
