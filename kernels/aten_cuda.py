"""Synchronised batch normalization with the CUDA kernels that torch ships.

The functions are those of `reference`, with the same arguments and results, on CUDA tensors and
without waiting for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bnconvert.kernels.reference import per_channel, statistics_dtype


def local_sums(input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
    """Return `[n·mean | M2 + n·mean² | n]` of this rank in float64; see `reference.local_sums`."""
    channels = input.shape[1]
    if input.numel() == 0:
        return input.new_zeros(2 * channels + 1, dtype=torch.float64)
    count = input.numel() // channels
    mean, var = torch.batch_norm_update_stats(input, None, None, 0.0)
    mean, var = mean.double(), var.double()
    number = mean.new_full((1,), count)
    return torch.cat((mean * count, (var + mean.square()) * count, number))


def normalize(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """Return the normalized input; see `reference.normalize`."""
    if input.numel() == 0:
        return torch.empty_like(input)
    dtype = statistics_dtype(input.dtype)
    return torch.batch_norm_elemt(input, weight, bias, mean.to(dtype), invstd.to(dtype), 0.0)


def backward_sums(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """Return `[Σdy | Σdy·x̂]` of this rank; see `reference.backward_sums`."""
    if input.numel() == 0:
        return mean.new_zeros(2 * input.shape[1])
    sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(
        grad_output, input, mean, invstd, None, True, False, False
    )
    return torch.cat((sum_dy, sum_dy_xmu * invstd))


def backward_input(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    """Return the gradient of the input; see `reference.backward_input`."""
    if input.numel() == 0:
        return torch.empty_like(input)
    sum_dy, sum_dy_xhat = (sums / count.to(sums.dtype)).chunk(2)
    scale = invstd if weight is None else invstd * weight
    dtype = statistics_dtype(input.dtype)
    centred = input.to(dtype) - per_channel(mean, input)
    slope = per_channel(sum_dy_xhat * invstd, input)
    grad = torch.addcmul(grad_output - per_channel(sum_dy, input), centred, slope, value=-1.0)
    return (grad * per_channel(scale.to(dtype), input)).to(input.dtype)
