"""BatchNorm layers that take their statistics over the batches of all ranks.

`SyncBatchNorm1d/2d/3d` are subclasses of torch's layers and behave as those do in eval mode,
without torch.distributed and with one rank, to the bit. In training they use exactly the
statistics of the concatenated batch; see `bnconvert.kernels.ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bnconvert.kernels import comm
from bnconvert.kernels.ops import synchronized_batch_norm
from bnconvert.kernels.recomputation import counting, counts_late, is_recomputation
from bnconvert.layers import classes, families
from bnconvert.layers.group import GroupRef, check_group
from bnconvert.layers.tracing import traced_call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SyncMixin(nn.Module):
    """Put in front of a BatchNorm class, makes its training statistics those of all ranks."""

    __signature__ = classes.OriginSignature()

    _bnconvert_prefix = "Sync"
    _bnconvert_public = ("process_group",)

    num_features: int
    eps: float
    momentum: float | None
    track_running_stats: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    weight: Any
    bias: Any
    _bnconvert_group: GroupRef

    def __init__(
        self, *args: Any, process_group: ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        check_group(process_group)
        self._bnconvert_group = GroupRef(process_group)

    @property
    def process_group(self) -> ProcessGroup | None:
        """The group over which statistics are taken; None is the default group."""
        return self._bnconvert_group.group

    @process_group.setter
    def process_group(self, group: ProcessGroup | None) -> None:
        check_group(group)
        self._bnconvert_group = GroupRef(group)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Normalize; in training, over the values of all ranks of the group.

        Args:
            input: As for the stock layer, (N, C, *); a rank may have N = 0 when others have values.

        Returns:
            The normalized input, of the same shape and dtype.
        """
        call: Tensor | None = traced_call(self, input)
        if call is not None:
            return call
        if self.training and counts_late(self):
            with counting():
                return self._forward(input)
        return self._forward(input)

    def _forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not self.training or not comm.communicates(self._bnconvert_group.name):
            return self._forward_alone(input)
        self._check_input_dim(input)  # type: ignore[operator]
        _check_channels(self, input)
        tracked = self.track_running_stats
        activation, negative_slope = self._bnconvert_activation(input)
        output: Tensor = synchronized_batch_norm(
            input,
            self.weight,
            self.bias,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.num_batches_tracked if tracked else None,
            self.momentum,
            self.eps,
            self._bnconvert_group.name,
            activation=activation,
            negative_slope=negative_slope,
        )
        return output if activation != "none" else self._bnconvert_finish(output)

    def _forward_alone(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return what the layer from before does, which counts a repeated forward once."""
        output: Tensor
        if not self.training or not is_recomputation():
            output = super().forward(input)
            return output
        statistics = self._buffers.copy()  # the same code runs: both forwards must save as much
        try:
            for name, buffer in statistics.items():
                self._buffers[name] = None if buffer is None else buffer.clone()
            output = super().forward(input)
        finally:
            self._buffers.update(statistics)
        return output

    def _bnconvert_activation(self, input: Tensor) -> tuple[str, float]:  # noqa: A002
        """Return the activation that normalization applies itself, not the layer, and its slope."""
        return "none", 0.0

    def _bnconvert_finish(self, output: Tensor) -> Tensor:
        """Apply what the layer does after normalization; nothing in the stock layers."""
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        return classes.reduce_derived(self, super().__reduce_ex__(max(int(protocol), 2)))


def _check_channels(layer: SyncMixin, input: Tensor) -> None:  # noqa: A002
    for tensor in (layer.weight, layer.running_mean):
        if tensor is not None and tensor.shape[0] != input.shape[1]:
            raise ValueError(
                f"expected {tensor.shape[0]} channels in dimension 1, got input of shape "
                f"{tuple(input.shape)}"
            )


class SyncBatchNorm1d(SyncMixin, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the batches of all ranks; input (N, C) or (N, C, L).

    Takes the arguments of `nn.BatchNorm1d` and `process_group`, None for the default group.
    """


class SyncBatchNorm2d(SyncMixin, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the batches of all ranks; input (N, C, H, W).

    Takes the arguments of `nn.BatchNorm2d` and `process_group`, None for the default group.
    """


class SyncBatchNorm3d(SyncMixin, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the batches of all ranks; input (N, C, D, H, W).

    Takes the arguments of `nn.BatchNorm3d` and `process_group`, None for the default group.
    """


families.SYNC_MIXINS[nn.BatchNorm2d.forward] = SyncMixin
for _origin, _cls in (
    (nn.BatchNorm1d, SyncBatchNorm1d),
    (nn.BatchNorm2d, SyncBatchNorm2d),
    (nn.BatchNorm3d, SyncBatchNorm3d),
):
    classes.register(SyncMixin, _origin, _cls)
