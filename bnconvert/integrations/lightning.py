"""Lightning: synchronised BatchNorm as a `LayerSync` plugin, and freezing as a callback.

Lightning's own plugin uses torch's converter, which replaces the layers: activations and dropout
that timm keeps inside them are lost, and reverting yields a class without a name. This one changes
the class of the layers and changes it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins import LayerSync

from bnconvert.convert import convert_sync_batchnorm, revert_sync_batchnorm
from bnconvert.freeze import freeze_batchnorm, unfreeze_batchnorm
from bnconvert.layers import Kind
from bnconvert.layers.frozen import frozen_state
from bnconvert.walk import find_norms

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn

    from bnconvert.layers.frozen import FrozenState
    from bnconvert.selection import Patterns


class BatchNormSync(LayerSync):  # type: ignore[misc]
    """Synchronises BatchNorm while a Trainer fits, and makes it plain again afterwards.

    Layers that were synchronised before stay so.

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
        self._own: list[nn.Module] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the BatchNorm layers of the model synchronised."""
        before = _synchronized(model)
        convert_sync_batchnorm(
            model, group_size=self.group_size, include=self.include, exclude=self.exclude
        )
        self._own += _synchronized(model).difference(before)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Make the layers plain again that `apply` synchronised."""
        own = {id(module) for module in self._own}
        self._own.clear()
        return revert_sync_batchnorm(model, include=lambda _, module: id(module) in own)


def _synchronized(model: nn.Module) -> set[nn.Module]:
    return {norm.module for norm in find_norms(model) if norm.kind is Kind.SYNC}


class BatchNormFreeze(Callback):  # type: ignore[misc]
    """Freezes BatchNorm layers while a Trainer fits.

    Layers are frozen before the optimizer is made and before `BatchNormSync` runs, which leaves
    them; they come back when the Trainer is done, or fails. What was frozen before stays frozen.
    Frozen statistics stay where another callback resets those of all layers to take them again, as
    StochasticWeightAveraging does.

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
        self._before: list[tuple[nn.Module, FrozenState | None]] = []
        self._statistics: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Freeze the layers."""
        if stage != "fit":
            return
        before = {norm.module: frozen_state(norm.module) for norm in find_norms(pl_module)}
        freeze_batchnorm(
            pl_module,
            stats=self.stats,
            affine=self.affine,
            include=self.include,
            exclude=self.exclude,
        )
        self._before += [(m, s) for m, s in before.items() if frozen_state(m) is not s]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the frozen statistics."""
        for norm in find_norms(pl_module):
            state = frozen_state(norm.module)
            if state is not None and state.stats:
                buffers = norm.module.named_buffers(recurse=False)
                self._statistics[norm.module] = {n: (b, b.clone()) for n, b in buffers}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Put back frozen statistics that were reset when the epoch started."""
        if batch_idx:
            return
        for module, statistics in self._statistics.items():
            state = frozen_state(module)
            if state is None or not state.stats:  # unfrozen since
                continue
            for name, (buffer, value) in statistics.items():
                module._buffers[name] = buffer
                buffer.copy_(value)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take back what `setup` did."""
        if stage == "fit":
            self._restore(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take back what `setup` did, as `teardown` is not called then."""
        self._restore(pl_module)

    def _restore(self, model: nn.Module) -> None:
        own = {id(module) for module, _ in self._before}
        unfreeze_batchnorm(model, include=lambda _, module: id(module) in own)
        for module, state in self._before:
            if state is not None:  # what was frozen before the run stays so
                freeze_batchnorm(module, stats=state.stats, affine=state.requires_grad is not None)
        self._before.clear()
        self._statistics.clear()
