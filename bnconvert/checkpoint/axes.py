"""Weights whose axes are not in torch's order, and how they become torch's.

The orders, as their frameworks name them: spatial axes first, then input and output channels
(`HWIO`, also for one or three spatial axes), depthwise kernels with a multiplier last (`HWIM`),
transposed convolutions (`HWOI`), and dense layers (`IO`). Flax's transposed convolutions correlate
where torch's convolve, so their kernels (`HWIO flipped`) are turned around along the spatial axes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bnconvert.checkpoint.names import layer_of
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.checkpoint.record import Weights
    from bnconvert.checkpoint.tensors import LazyTensor

FLIPPED = "HWIO flipped"


def permutation(order: str, dimensions: int) -> tuple[int, ...]:
    """Return the order in which torch has the axes of a weight.

    Args:
        order: "HWIO", "HWIM", "HWOI", "HWIO flipped" or "IO".
        dimensions: Number of axes.
    """
    spatial = tuple(range(dimensions - 2))
    if order in ("HWIM", FLIPPED):
        return (dimensions - 2, dimensions - 1, *spatial)
    return (dimensions - 1, dimensions - 2, *spatial)


def torch_shape(tensor: LazyTensor) -> tuple[int, ...]:
    """Return the shape that the tensor has in torch."""
    shape = tuple(tensor.shape[axis] for axis in permutation(tensor.order, len(tensor.shape)))
    return (shape[0] * shape[1], 1, *shape[2:]) if tensor.order == "HWIM" else shape


def to_torch(tensor: LazyTensor) -> LazyTensor:
    """Return a weight with torch's order of axes; one that has it already is returned as it is."""
    if not tensor.order:
        return tensor
    axes, shape = permutation(tensor.order, len(tensor.shape)), torch_shape(tensor)

    def load() -> Tensor:
        values = tensor.load()
        if tensor.order == FLIPPED:
            values = values.flip(tuple(range(values.dim() - 2)))
        return values.permute(axes).reshape(shape).contiguous()

    return replace(tensor, shape=shape, load=load, extent=None, order="", shares=None)


def order_axes(weights: Weights, changes: dict[str, list[str]]) -> None:
    """Give all weights torch's order of axes, and torch's name `weight` to kernels.

    Args:
        weights: Changed in place.
        changes: What was done is entered here, by new name.

    Raises:
        CheckpointError: Two tensors would come to have one name.
    """
    renamed = {}
    for name, tensor in weights.tensors.items():
        layer, leaf = layer_of(name)
        new = f"{layer}.weight".lstrip(".") if tensor.order and leaf == "kernel" else name
        if tensor.order:
            shape = list(torch_shape(tensor))
            changes[new] = [f"{tensor.order} {list(tensor.shape)} -> {shape}, was {name}"]
        if new in renamed:
            raise CheckpointError(f"{name}: would be named {new}, as another tensor is")
        renamed[new] = to_torch(tensor)
    weights.tensors = renamed
