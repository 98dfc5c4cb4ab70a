"""The counterparts of timm's `BatchNormAct2d`, which applies dropout and an activation itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct
from torch import nn

from bnconvert.kernels.ops import fuses_activations
from bnconvert.layers import classes, families
from bnconvert.layers.frozen import FrozenMixin
from bnconvert.layers.own_forward import replaces_forward
from bnconvert.layers.sync import SyncMixin

if TYPE_CHECKING:
    from torch import Tensor


_FUSED = {nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.SiLU: "silu"}
"""The activations that our kernels apply."""


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or replaces_forward(module)
    )


class _ActMixin(nn.Module):
    """What a `BatchNormAct2d` does beside normalization."""

    act: nn.Module
    drop: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, drop out and activate; the input has timm's name for it.

        Args:
            x: (N, C, H, W).
        """
        output: Tensor = super().forward(x)
        return output

    def _bnconvert_finish(self, output: Tensor) -> Tensor:
        """Apply the layer's dropout and activation."""
        activated: Tensor = self.act(self.drop(output))
        return activated

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (torch's name)
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")


class SyncActMixin(_ActMixin, SyncMixin):
    """Put in front of `BatchNormAct2d`: synchronised statistics, then what the layer does after."""

    def _bnconvert_activation(self, input: Tensor) -> tuple[str, float]:  # noqa: A002
        """Return the layer's activation where our kernels apply it in the same pass.

        They do if it is exactly one that they know, nothing hooks into it and no dropout precedes.
        """
        if not fuses_activations(input.device.type) or type(self.drop) is not nn.Identity:
            return "none", 0.0
        name = _FUSED.get(type(self.act), "none")
        if _is_hooked(self.drop) or _is_hooked(self.act):
            name = "none"
        return name, float(getattr(self.act, "negative_slope", 0.0))


class FrozenActMixin(_ActMixin, FrozenMixin):
    """Put in front of `BatchNormAct2d`: stored statistics, then what the layer does after."""


class SyncBatchNormAct2d(SyncActMixin, BatchNormAct2d):  # type: ignore[misc]
    """timm's `BatchNormAct2d` over the batches of all ranks; input (N, C, H, W).

    Takes the arguments of `timm.layers.BatchNormAct2d` and `process_group`, None for the default
    group. Dropout and activation of the layer run after normalization, as timm's do.
    """


class FrozenBatchNormAct2d(FrozenActMixin, BatchNormAct2d):  # type: ignore[misc]
    """timm's `BatchNormAct2d` with frozen statistics, weight and bias; input (N, C, H, W)."""


families.SYNC_MIXINS[BatchNormAct2d.forward] = SyncActMixin
families.FROZEN_MIXINS[BatchNormAct2d.forward] = FrozenActMixin
families.FROZEN_MIXINS[SyncBatchNormAct.forward] = FrozenActMixin
classes.register(FrozenActMixin, BatchNormAct2d, FrozenBatchNormAct2d)
classes.register(SyncActMixin, BatchNormAct2d, SyncBatchNormAct2d)
