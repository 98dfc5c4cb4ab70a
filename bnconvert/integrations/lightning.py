"""Lightning: synchronised BatchNorm as a `LayerSync` plugin, and freezing as a callback.

Lightning's own plugin uses torch's converter, which replaces the layers: activations and dropout
that timm keeps inside them are lost, and reverting yields a class without a name. This one changes
the class of the layers and changes it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Callback
from lightning.pytorch.plugins import LayerSync

from bnconvert.convert import convert_sync_batchnorm, revert_sync_batchnorm
from bnconvert.freeze import freeze_batchnorm, unfreeze_batchnorm

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from bnconvert.selection import Patterns


class BatchNormSync(LayerSync):  # type: ignore[misc]
    """Synchronises BatchNorm while a Trainer fits, and makes it plain again afterwards.

    Use it as `Trainer(plugins=[BatchNormSync()], ...)`, without `sync_batchnorm=True`.

    Args:
        group_size: Take statistics over this many consecutive ranks; None takes all.
        include: Synchronise only these layers, as in `convert_sync_batchnorm`.
        exclude: Leave these layers.
    """

    def __init__(
        self,
        *,
        group_size: int | None = None,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> None:
        self.group_size = group_size
        self.include = include
        self.exclude = exclude

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the BatchNorm layers of the model synchronised."""
        return convert_sync_batchnorm(
            model, group_size=self.group_size, include=self.include, exclude=self.exclude
        )

    def revert(self, model: nn.Module) -> nn.Module:
        """Make the layers plain again."""
        return revert_sync_batchnorm(model, include=self.include, exclude=self.exclude)


class BatchNormFreeze(Callback):  # type: ignore[misc]
    """Freezes BatchNorm layers while a Trainer fits.

    Layers are frozen before the optimizer is made and before `BatchNormSync` runs, which leaves
    them; they come back when the Trainer is done.

    Args:
        stats: Freeze the running statistics.
        affine: Freeze weight and bias.
        include: Freeze only these layers, as in `freeze_batchnorm`.
        exclude: Leave these layers.
    """

    def __init__(
        self,
        *,
        stats: bool = True,
        affine: bool = True,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> None:
        self.stats = stats
        self.affine = affine
        self.include = include
        self.exclude = exclude

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Freeze the layers."""
        if stage == "fit":
            freeze_batchnorm(
                pl_module,
                stats=self.stats,
                affine=self.affine,
                include=self.include,
                exclude=self.exclude,
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take back what `setup` did."""
        if stage == "fit":
            unfreeze_batchnorm(pl_module, include=self.include, exclude=self.exclude)
