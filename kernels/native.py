"""Synchronised batch normalization with the project's own kernels, on whatever a driver runs.

The functions take dense tensors with the channels in dimension 1; `ops` says when they are used.
A driver launches a compiled variant of a kernel: `driver.CudaDriver` on a GPU. The kernels read
their arguments from one structure, which is packed here in the order of the `*Arguments` in the
sources.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bnconvert.kernels.geometry import Extent, Geometry, divide
from bnconvert.kernels.variants import SCALARS, VECTOR_BYTES, Variant, widths

_STATS = struct.Struct("4Qd")
_NORMALIZE = struct.Struct("11Q2df2i4x")
_BACKWARD_REDUCE = struct.Struct("11Qfi")
_BACKWARD_INPUT = struct.Struct("9Qfi")

_SCALAR_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
"""`ScalarType` in the sources."""

_MAX_POSITIONS = 2**31 - 1
"""What an int of the sources counts; whole tensors and channels may have more elements."""


class Driver(Protocol):
    """Runs kernels on one device."""

    @property
    def multiprocessors(self) -> int:
        """Number of multiprocessors of the device."""

    def counters(self, count: int) -> Tensor:
        """Return at least `count` zeroed 32-bit counters, which launches leave zeroed."""

    def launch(
        self,
        variant: Variant,
        grid: tuple[int, int],
        block: tuple[int, int],
        shared_bytes: int,
        arguments: bytes,
    ) -> None:
        """Start a kernel behind the work that the current stream holds already."""


@dataclass(frozen=True)
class Activation:
    """What is applied after the normalization.

    Attributes:
        name: A key of `variants.ACTIVATIONS`.
        negative_slope: Slope below zero, of "leaky_relu".
    """

    name: str = "none"
    negative_slope: float = 0.0


def unsupported(
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> str:
    """Return why the kernels cannot take these tensors, "" when they can."""
    if input.dtype not in SCALARS:
        return f"they take float32, float16 and bfloat16, not {_name(input.dtype)}"
    if input.shape[2:].numel() > _MAX_POSITIONS:
        return f"they take at most {_MAX_POSITIONS} positions per channel of an image"
    for tensor in (weight, bias):
        if tensor is not None and tensor.dtype not in (torch.float32, input.dtype):
            return (
                f"they take parameters in float32 or the input's dtype, not {_name(tensor.dtype)}"
            )
    for first, second in ((weight, bias), (running_mean, running_var)):
        if first is not None and second is not None and first.dtype != second.dtype:
            return "weight and bias, and both running statistics, must be of one dtype"
    if any(
        t is not None and not t.is_contiguous() for t in (weight, bias, running_mean, running_var)
    ):
        return "they take contiguous parameters and buffers"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def local_sums(driver: Driver, input: Tensor) -> Tensor:  # noqa: A002
    """Return this rank's `[n·mean | M2 + n·mean² | n]`.

    Args:
        driver: Runs the kernels.
        input: Shape (N, C, *), dense; may be empty.

    Returns:
        float64 of shape (2C + 1,).
    """
    channels = input.shape[1]
    if input.numel() == 0:
        return input.new_zeros(2 * channels + 1, dtype=torch.float64)
    sums = input.new_empty(2 * channels + 1, dtype=torch.float64)
    variant, geometry = _prepare(driver, "stats", Activation(), (input,))
    partials, counters = _workspace(driver, input, geometry)
    arguments = geometry.packed + _STATS.pack(
        _address(partials),
        counters.data_ptr(),
        input.data_ptr(),
        sums.data_ptr(),
        input.numel() // channels,
    )
    driver.launch(variant, geometry.grid, geometry.block, geometry.reduction_bytes, arguments)
    return sums


def normalize_(
    driver: Driver,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    activation: Activation,
) -> tuple[Tensor, Tensor]:
    """Normalize, and update the running statistics in place.

    Args:
        driver: Runs the kernels.
        input: Shape (N, C, *), dense; may be empty.
        residual: Added before the activation; of the shape, dtype and layout of `input`.
        weight: Shape (C,), or None.
        bias: Shape (C,), or None.
        sums: From `local_sums`, added over all ranks.
        running_mean: Shape (C,), or None.
        running_var: Shape (C,), or None.
        num_batches_tracked: int64 scalar, or None.
        momentum: Weight of this batch; None for the cumulative average.
        eps: Added to the variance.
        activation: Applied last.

    Returns:
        The output, like `input`, and the statistics for the backward pass: `[mean | invstd |
        count]`, float64 of shape (2C + 1,).
    """
    output = torch.empty_like(input)
    statistics = torch.empty_like(sums)
    tensors = (input, output) if residual is None else (input, residual, output)
    variant, geometry = _prepare(driver, "normalize", activation, tensors, residual is not None)
    arguments = geometry.packed + _NORMALIZE.pack(
        input.data_ptr(),
        _address(residual),
        output.data_ptr(),
        sums.data_ptr(),
        statistics.data_ptr(),
        _address(weight),
        _address(bias),
        _address(running_mean),
        _address(running_var),
        _address(num_batches_tracked),
        driver.counters(1).data_ptr(),
        eps,
        -1.0 if momentum is None else momentum,
        activation.negative_slope,
        _scalar_type(weight, bias),
        _scalar_type(running_mean, running_var),
    )
    driver.launch(variant, geometry.grid, geometry.block, geometry.constant_bytes(3), arguments)
    return output, statistics


def backward_sums(
    driver: Driver,
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's sums over the gradient before the activation.

    Args:
        driver: Runs the kernels.
        grad_output: Of the shape, dtype and layout of `input`.
        input: Shape (N, C, *), dense; may be empty.
        residual: What the forward pass added, or None.
        weight: Shape (C,), or None.
        bias: Shape (C,), or None.
        statistics: From `normalize_`.
        activation: That of the forward pass.

    Returns:
        `[Σdy | Σdy·x̂]`, float32 of shape (2C,), and the gradients of weight and bias in their
        dtypes, empty without a weight or bias.
    """
    channels = input.shape[1]
    sums = input.new_empty(2 * channels, dtype=torch.float32)
    grad_weight, grad_bias = (
        sums.new_empty(0) if t is None else torch.empty_like(t) for t in (weight, bias)
    )
    if input.numel() == 0:
        return sums.zero_(), grad_weight.zero_(), grad_bias.zero_()
    if activation.name == "none":
        residual = None
    tensors = (input, grad_output) if residual is None else (input, grad_output, residual)
    variant, geometry = _prepare(
        driver, "backward_reduce", activation, tensors, residual is not None
    )
    partials, counters = _workspace(driver, input, geometry)
    arguments = geometry.packed + _BACKWARD_REDUCE.pack(
        _address(partials),
        counters.data_ptr(),
        grad_output.data_ptr(),
        input.data_ptr(),
        _address(residual),
        statistics.data_ptr(),
        _address(weight),
        _address(bias),
        sums.data_ptr(),
        grad_weight.data_ptr() if weight is not None else 0,
        grad_bias.data_ptr() if bias is not None else 0,
        activation.negative_slope,
        _scalar_type(weight, bias),
    )
    driver.launch(variant, geometry.grid, geometry.block, geometry.reduction_bytes, arguments)
    return sums, grad_weight, grad_bias


def backward_input(
    driver: Driver,
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sums: Tensor,
    activation: Activation,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and of the residual.

    Args:
        driver: Runs the kernels.
        grad_output: Of the shape, dtype and layout of `input`.
        input: Shape (N, C, *), dense; may be empty.
        residual: What the forward pass added, or None.
        weight: Shape (C,), or None.
        bias: Shape (C,), or None.
        statistics: From `normalize_`.
        sums: From `backward_sums`, added over all ranks.
        activation: That of the forward pass.

    Returns:
        Two tensors like `input`. The second one is empty without a residual, and without an
        activation, where `grad_output` is the gradient of the residual.
    """
    grad_input = torch.empty_like(input)
    if activation.name == "none":
        residual = None
    grad_residual = input.new_empty(0) if residual is None else torch.empty_like(input)
    if input.numel() == 0:
        return grad_input, grad_residual
    tensors: tuple[Tensor, ...] = (input, grad_output, grad_input)
    if residual is not None:
        tensors = (*tensors, residual, grad_residual)
    variant, geometry = _prepare(
        driver, "backward_input", activation, tensors, residual is not None
    )
    arguments = geometry.packed + _BACKWARD_INPUT.pack(
        grad_output.data_ptr(),
        input.data_ptr(),
        _address(residual),
        grad_input.data_ptr(),
        grad_residual.data_ptr() if residual is not None else 0,
        statistics.data_ptr(),
        _address(weight),
        _address(bias),
        sums.data_ptr(),
        activation.negative_slope,
        _scalar_type(weight, bias),
    )
    driver.launch(variant, geometry.grid, geometry.block, geometry.constant_bytes(5), arguments)
    return grad_input, grad_residual


def _prepare(
    driver: Driver,
    kernel: str,
    activation: Activation,
    tensors: tuple[Tensor, ...],
    residual: bool = False,
) -> tuple[Variant, Geometry]:
    """Choose the instantiation and the launch for tensors that are laid out alike."""
    extent = _extent(tensors)
    variant = Variant(
        kernel,
        tensors[0].dtype,
        extent.channels_last,
        extent.width,
        activation.name,
        residual,
    )
    return variant, divide(extent, driver.multiprocessors)


def _extent(tensors: tuple[Tensor, ...]) -> Extent:
    first = tensors[0]
    rows, channels = first.shape[0], first.shape[1]
    spatial = first.shape[2:].numel()
    channels_last = spatial == 1 or not first.is_contiguous()
    if channels_last:
        rows, spatial = rows * spatial, 1
    along = channels if channels_last else spatial
    misaligned = 0
    for tensor in tensors:
        misaligned |= tensor.data_ptr() % VECTOR_BYTES
    itemsize = first.dtype.itemsize
    for width in widths(first.dtype):
        if along % width == 0 and misaligned % (width * itemsize) == 0:
            break
    return Extent(rows, channels, spatial, channels_last, width)


def _workspace(driver: Driver, input: Tensor, geometry: Geometry) -> tuple[Tensor | None, Tensor]:  # noqa: A002
    """Return memory for the partial sums of the splits, None for one split, and the counters."""
    tiles, splits = geometry.grid
    partials = None
    if splits > 1:
        partials = input.new_empty(splits * 2 * input.shape[1], dtype=torch.float32)
    return partials, driver.counters(tiles)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _scalar_type(*tensors: Tensor | None) -> int:
    return next((_SCALAR_TYPES[t.dtype] for t in tensors if t is not None), 0)
