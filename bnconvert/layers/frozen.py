"""BatchNorm layers that normalize with their stored statistics in training, too.

A frozen layer gives the same output in train mode as in eval mode and never changes its
statistics, whatever `model.train()`, an optimizer or DistributedDataParallel do around it. Freezing
only the weight and bias needs no class of its own: they do not require gradients, and the layer
remembers whether they did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from bnconvert.layers import classes, families
from bnconvert.layers.tracing import traced_call

if TYPE_CHECKING:
    from collections.abc import Mapping

FROZEN_KEY = "_bnconvert_frozen"
"""Where a frozen layer keeps its `FrozenState`."""

AFFINE = ("weight", "bias")


@dataclass(frozen=True)
class FrozenState:
    """What is frozen about a layer, and what to restore.

    Attributes:
        stats: Whether its statistics are frozen.
        requires_grad: The flags of weight and bias from before; None when they are not frozen.
    """

    stats: bool
    requires_grad: Mapping[str, bool] | None


def frozen_state(module: nn.Module) -> FrozenState | None:
    """Return what is frozen about a layer by bnconvert, or None."""
    state: FrozenState | None = module.__dict__.get(FROZEN_KEY)
    return state


def affine_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weight and bias that a layer has, or the parameters that it makes them of.

    Those are parameters of the layer under other names, as pruning and weight norm have them, and
    those of its parametrizations.
    """
    found = dict(module._parameters)
    parametrized = getattr(module, "parametrizations", None)
    if isinstance(parametrized, nn.ModuleDict):
        for name in AFFINE:
            if name in parametrized:
                found.update(
                    (f"parametrizations.{name}.{key}", parameter)
                    for key, parameter in parametrized[name].named_parameters()
                )
    return {name: parameter for name, parameter in found.items() if parameter is not None}


def not_parameters(module: nn.Module) -> list[str]:
    """Return "weight" and "bias" where they are tensors that no parameter of the layer makes.

    FullyShardedDataParallel keeps the values of several layers in one flat parameter of its own,
    and gives the layers views into it, which are not always filled.
    """
    made = {_made_of(name) for name in affine_parameters(module)}
    return [
        name
        for name in AFFINE
        if isinstance(module.__dict__.get(name), Tensor) and name not in made
    ]


def recorded_flags(state: FrozenState | None, module: nn.Module) -> dict[str, bool]:
    """Return the recorded `requires_grad` of the parameters that a layer has now.

    A weight that was pruned or parametrized since, or is no more, has other parameters than those
    that were recorded; they take the flag of what was recorded for the same weight.
    """
    recorded = (state and state.requires_grad) or {}
    made_of: dict[str, bool] = {}
    for name, required in recorded.items():
        made_of[_made_of(name)] = made_of.get(_made_of(name), False) or required
    return {
        name: recorded.get(name, made_of[_made_of(name)])
        for name in affine_parameters(module)
        if name in recorded or _made_of(name) in made_of
    }


def _made_of(name: str) -> str:
    """Return "weight" for `weight_orig` and `parametrizations.weight.original`, for example."""
    base = name.removeprefix("parametrizations.")
    return next((own for own in AFFINE if base.startswith((f"{own}_", f"{own}."))), name)


class FrozenMixin(nn.Module):
    """Put in front of a BatchNorm class, makes it normalize with its stored statistics only."""

    __signature__ = classes.OriginSignature()

    _bnconvert_prefix = "Frozen"
    _bnconvert_public = ()

    eps: float
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Any
    bias: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.running_mean is None:
            raise ValueError("track_running_stats=False: a frozen layer needs running statistics")
        affine = affine_parameters(self)
        self.__dict__[FROZEN_KEY] = FrozenState(True, dict.fromkeys(affine, True))
        for parameter in affine.values():
            parameter.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Normalize with the running statistics, in train and in eval mode.

        Args:
            input: As for the stock layer, (N, C, *).

        Returns:
            The normalized input, of the same shape and dtype.
        """
        call: Tensor | None = traced_call(self, input)
        if call is not None:
            return call
        self._check_input_dim(input)  # type: ignore[operator]
        output = F.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=False,
            eps=self.eps,
        )
        return self._bnconvert_finish(output)

    def reset_running_stats(self) -> None:
        """Leave the statistics alone once they are frozen; `update_bn` resets them everywhere."""
        state = frozen_state(self)
        if state is None or not state.stats:
            super().reset_running_stats()  # type: ignore[misc]

    def reset_parameters(self) -> None:
        """Start anew, frozen statistics too: memory from `to_empty` holds anything."""
        super().reset_running_stats()  # type: ignore[misc]
        super().reset_parameters()  # type: ignore[misc]

    def _bnconvert_finish(self, output: Tensor) -> Tensor:
        """Apply what the layer does after normalization; nothing in the stock layers."""
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        return classes.reduce_derived(self, super().__reduce_ex__(max(int(protocol), 2)))


class FrozenBatchNorm1d(FrozenMixin, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with frozen statistics, weight and bias; input (N, C) or (N, C, L)."""


class FrozenBatchNorm2d(FrozenMixin, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with frozen statistics, weight and bias; input (N, C, H, W)."""


class FrozenBatchNorm3d(FrozenMixin, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with frozen statistics, weight and bias; input (N, C, D, H, W)."""


families.FROZEN_MIXINS[nn.BatchNorm2d.forward] = FrozenMixin
families.FROZEN_MIXINS[nn.SyncBatchNorm.forward] = FrozenMixin
for _origin, _cls in (
    (nn.BatchNorm1d, FrozenBatchNorm1d),
    (nn.BatchNorm2d, FrozenBatchNorm2d),
    (nn.BatchNorm3d, FrozenBatchNorm3d),
):
    classes.register(FrozenMixin, _origin, _cls)
