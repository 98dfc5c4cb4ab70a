"""The counterparts of timm's `BatchNormAct2d`, which applies dropout and an activation itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm.layers.norm_act import BatchNormAct2d

from bnconvert.layers import classes, families
from bnconvert.layers.sync import SyncMixin

if TYPE_CHECKING:
    from torch import Tensor, nn


class SyncActMixin(SyncMixin):
    """Put in front of `BatchNormAct2d`: synchronised statistics, then what the layer does after."""

    act: nn.Module
    drop: nn.Module

    def finish(self, output: Tensor) -> Tensor:
        """Apply the layer's dropout and activation."""
        activated: Tensor = self.act(self.drop(output))
        return activated

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (torch's name)
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")


class SyncBatchNormAct2d(SyncActMixin, BatchNormAct2d):  # type: ignore[misc]
    """timm's `BatchNormAct2d` over the batches of all ranks; input (N, C, H, W).

    Takes the arguments of `timm.layers.BatchNormAct2d` and `process_group`, None for the default
    group. Dropout and activation of the layer run after normalization, as timm's do.
    """


families.SYNC_MIXINS[BatchNormAct2d.forward] = SyncActMixin
classes.register(SyncActMixin, BatchNormAct2d, SyncBatchNormAct2d)
