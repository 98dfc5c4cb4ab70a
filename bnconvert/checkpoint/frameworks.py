"""Names that Keras, TensorFlow and Flax give to tensors, and what they are in torch.

Each returns the torch leaf and, for kernels, the order of the axes. Kernels keep their own name
until conversion has put their axes in torch's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from bnconvert.checkpoint.tensors import LazyTensor

STATISTICS = {
    "gamma": "weight",
    "beta": "bias",
    "scale": "weight",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "mean": "running_mean",
    "var": "running_var",
    "biases": "bias",
    "b": "bias",
    "embeddings": "weight",
    "embedding": "weight",
}
KERNELS = ("kernel", "weights", "w")
DEPTHWISE = ("depthwise_kernel", "depthwise_weights")
POINTWISE = ("pointwise_kernel", "pointwise_weights")


def leaf_of(leaf: str, tensor: LazyTensor, transposed: bool = False) -> tuple[str, LazyTensor]:
    """Return the torch name of a tensor within its layer, and the tensor with its axes described.

    Args:
        leaf: What the framework calls it.
        tensor: The tensor.
        transposed: Whether its layer is a transposed convolution.
    """
    dimensions = len(tensor.shape)
    if leaf in DEPTHWISE:
        return "depthwise.kernel", tensor.ordered("HWIM")
    if leaf in POINTWISE:
        return "pointwise.kernel", tensor.ordered("HWIO")
    if leaf in KERNELS and dimensions == 2:
        return "kernel", tensor.ordered("IO")
    if leaf in KERNELS and dimensions > 2:
        return "kernel", tensor.ordered("HWOI" if transposed else "HWIO")
    return STATISTICS.get(leaf, leaf), tensor


def add(tensors: dict[str, LazyTensor], layer: str, leaf: str, tensor: LazyTensor) -> None:
    """Enter a tensor under its layer; two of one name are refused."""
    name = f"{layer}.{leaf}" if layer else leaf
    if name in tensors:
        raise CheckpointError(f"two tensors would be named {name!r}; the file is ambiguous")
    tensors[name] = tensor
