"""Synchronised batch normalization in ATen operators: the CPU path, and the last resort elsewhere.

Statistics travel between ranks as sums, `[n·mean | M2 + n·mean² | n]` in float64 with M2 the sum of
squared differences from the rank's own mean, so that adding the buffers of all ranks gives the
statistics of the concatenated batch, and a rank without values adds zeros. Every function takes
the channels in dimension 1, as torch does.

Formulas: Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167; merging of means
and M2: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances (1979).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default

_ILL_CONDITIONED = 16.0
"""|mean|/sd above which `x·a + b` loses digits that `(x - mean)·a + b'` keeps."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return `values` of shape (C,) in a shape that broadcasts over dimension 1 of `like`."""
    return values.view(-1, *(1,) * (like.dim() - 2))


def local_sums(input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
    """Return this rank's sums.

    Where a mean is more than a standard deviation from zero, Σx² has lost digits of the variance,
    or overflows; then the means are subtracted and the sums taken again.

    Args:
        input: Values of shape (N, C, *); may be empty.

    Returns:
        float64 of shape (2C + 1,): `[n·mean | M2 + n·mean² | n]`, which is `[Σx | Σx² | n]`.
    """
    channels = input.shape[1]
    if input.numel() == 0:
        return input.new_zeros(2 * channels + 1, dtype=torch.float64)
    count = input.numel() // channels
    dtype = statistics_dtype(input.dtype)
    values = input if input.dtype == dtype else input.to(dtype)
    total, squares = _two_sums(values)
    spread = torch.addcmul(squares, total, total, value=-2.0 / count)
    least, greatest = torch.aminmax(spread)
    if not 0.0 <= float(least) <= float(greatest) < math.inf:
        shift = (total / count).to(dtype)
        centred, squares = _two_sums(values - per_channel(shift, values))
        shift = shift.double()
        total = torch.add(centred, shift, alpha=count)
        squares.addcmul_(shift, centred + total)
    return torch.cat((total, squares, _number(count, input.device)))


def _two_sums(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σx and Σx² of each channel, float64 of shape (C,).

    The sums that ATen takes for the backward of batch normalization, Σdy and Σdy·(x - mean)·invstd,
    are these when both of its inputs are x. They are several times faster than its statistics, but
    added in the dtype of x: so each short piece of a channel is given to it as a channel of its
    own, and the pieces are added here.
    """
    channels = values.shape[1]
    pieces, in_a_row = _pieces(values)
    totals, squares = [], []
    for x in pieces:
        zeros, ones = _zeros_and_ones(x.shape[1], x.dtype, x.device)
        total, square = _backward_sums(x, x, zeros, ones)
        totals.append(total)
        squares.append(square)

    def added(sums: list[Tensor]) -> Tensor:
        joined = sums[0] if len(sums) == 1 else torch.cat(sums)
        return joined.view(-1, channels, in_a_row).sum((0, 2), dtype=torch.float64)

    return added(totals), added(squares)


@lru_cache(maxsize=256)
def _zeros_and_ones(
    channels: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return a mean and an invstd that change nothing, of shape (C,); not to be written to."""
    with torch.inference_mode(False):
        both = _kept_zeros_and_ones((channels - 1).bit_length(), dtype, device)
        return both[0, :channels], both[1, :channels]


@cache
def _kept_zeros_and_ones(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a row of zeros and one of ones; of all lengths they take twice what the longest do."""
    return torch.stack([torch.full((2**bits,), n, dtype=dtype, device=device) for n in (0, 1)])


@lru_cache(maxsize=256)
def _number(value: int, device: torch.device) -> Tensor:
    """Return the value as float64 of shape (1,); not to be written to."""
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=torch.float64, device=device)


def _pieces(values: Tensor) -> tuple[list[Tensor], int]:
    """Return the values with the pieces of their channels in place of the channels.

    Returns:
        Tensors of shape (1, pieces, *), and how many pieces of one channel follow each other.
    """
    batch, channels = values.shape[:2]
    count = values.numel() // channels
    if values.dim() > 2 and values.is_contiguous():
        split = _splits(count // batch)
        return [values.view(1, -1, count // batch // split)], split
    images = []
    start = values.storage_offset()
    for pieces, rows in _blocks(count, channels):
        # in channels-last layout, one pixel a row
        width = pieces * channels
        images.append(values.as_strided((1, width, rows, 1), (1, 1, width, width), start))
        start += width * rows
    return images, 1


_PLANE = 2048
_ROWS = 256
"""Values added one after another in float32; those of a plane are added in several lanes."""

_WIDTH = 1024
"""Channels whose sums, means and invstds stay in a first-level cache of 32 KiB."""


@cache
def _splits(size: int) -> int:
    """Return the number of equal pieces of a plane."""
    least = -(-size // _PLANE)
    return next((split for split in range(least, 4 * least) if size % split == 0), 1)


@lru_cache(maxsize=256)
def _blocks(count: int, channels: int) -> tuple[tuple[int, int], ...]:
    """Return blocks that `count` rows are cut into: pieces of a channel, and rows of a piece."""
    rows = next((rows for rows in range(2 * _ROWS - 1, _ROWS - 1, -1) if count % rows == 0), _ROWS)
    pieces, rest = divmod(count, rows)
    together = max(1, _WIDTH // channels)
    blocks = [(together, rows)] * (pieces // together)
    blocks += [(pieces % together, rows), (1, rest)]
    return tuple((pieces, rows) for pieces, rows in blocks if pieces and rows)


def finalize(sums: Tensor) -> Tensor:
    """Return the statistics of the batch that reduced sums describe.

    Args:
        sums: float64 of shape (2C + 1,), as from `local_sums`, added over all ranks.

    Returns:
        `[mean | var | n]` in float64, of shape (2C + 1,), with the biased variance. Where no rank
        has a value the mean and the variance are NaN.
    """
    count = sums[-1:]
    statistics = sums / count
    mean, var, one = parts(statistics)
    # Rounding can take a variance of zero below zero, never a batch's own variance.
    var.addcmul_(mean, mean, value=-1.0).clamp_(min=0.0)
    one.copy_(count)
    return statistics


def parts(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the mean, of the variance or what stands there, and of the count."""
    channels = statistics.shape[0] // 2
    mean, var, count = statistics.split_with_sizes((channels, channels, 1))
    return mean, var, count


def update_running_stats(
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> None:
    """Update the running statistics in place, as `nn.BatchNorm` does on the whole batch.

    Nothing is updated where the batch has no value, and `running_var`, which takes the unbiased
    variance, not where it has one value.

    Args:
        mean: Mean of the batch, float64 of shape (C,).
        var: Biased variance of the batch, float64 of shape (C,).
        count: Number of values per channel, float64 of shape (1,).
        running_mean: Shape (C,), or None.
        running_var: Shape (C,), or None.
        num_batches_tracked: int64 scalar, or None.
        momentum: Weight of the batch, or None for the cumulative average.
    """
    if num_batches_tracked is not None:
        num_batches_tracked.add_(count[0] > 0)
    factor: Tensor | float
    if momentum is not None:
        factor = momentum
    elif num_batches_tracked is not None:
        factor = num_batches_tracked.double().clamp(min=1.0).reciprocal()
    else:
        factor = 0.0
    unbiased = var * (count / (count - 1.0))
    for running, batch, least in ((running_mean, mean, 0), (running_var, unbiased, 1)):
        if running is not None:
            old = running.double()
            updated = (1.0 - factor) * old + factor * batch
            running.copy_(torch.where(count > least, updated, old))


def normalize(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """Return `weight·(input - mean)·invstd + bias` in the dtype and layout of `input`.

    Args:
        input: Shape (N, C, *), dense; may be empty.
        weight: Shape (C,), or None for ones.
        bias: Shape (C,), or None for zeros.
        mean: float64 of shape (C,).
        invstd: 1/sqrt(var + eps), float64 of shape (C,).
    """
    if input.numel() == 0:
        return torch.empty_like(input)
    if weight is not None and input.dtype != torch.float64:
        _check_affine_dtype(input, weight)
    dtype = statistics_dtype(input.dtype)
    invstd = invstd.to(dtype)
    slope = invstd if weight is None else invstd * weight
    return _affine(input, mean, invstd, slope, bias).to(input.dtype)


def _check_affine_dtype(input: Tensor, weight: Tensor) -> None:  # noqa: A002
    """Refuse what torch refuses: a weight of another dtype than the input's or float32."""
    if weight.dtype not in (input.dtype, torch.float32):
        raise RuntimeError(
            f"expected weight of dtype {input.dtype} or float32 for input of dtype {input.dtype}, "
            f"but got {weight.dtype}"
        )


def _affine(
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
    slope: Tensor,
    offset: Tensor | None,
) -> Tensor:
    """Return `(input - mean)·slope + offset` in the dtype of statistics.

    The operators that are vectorized compute `input·slope + (offset - mean·slope)`; the mean is
    subtracted beforehand where that would cancel.
    """
    dtype = slope.dtype
    zeros, ones = _zeros_and_ones(slope.shape[0], dtype, slope.device)
    offset = zeros if offset is None else offset.to(dtype)
    shift = mean.to(dtype)
    least, greatest = torch.aminmax(shift * invstd)
    if not -_ILL_CONDITIONED <= float(least) <= float(greatest) <= _ILL_CONDITIONED:
        input = input - per_channel(shift, input)  # noqa: A001
        shift = (mean - shift).to(dtype)
    if input.dim() > 2 and input.is_contiguous():
        planes = torch.native_batch_norm(input, slope, offset, shift, ones, False, 0.0, 0.0)
        return planes[0]
    offset = torch.addcmul(offset, shift, slope, value=-1.0)
    return torch.addcmul(per_channel(offset, input), input, per_channel(slope, input))


def backward_sums(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """Return this rank's `[Σdy | Σdy·x̂]`, which are also the gradients of bias and weight.

    Args:
        grad_output: Shape (N, C, *), of the layout of `input`.
        input: Shape (N, C, *), dense; may be empty.
        mean: Mean of the whole batch, float32 (float64 for float64 input), shape (C,).
        invstd: 1/sqrt(var + eps), likewise.

    Returns:
        Shape (2C,), of the dtype of `mean`.
    """
    if input.numel() == 0:
        return mean.new_zeros(2 * mean.shape[0])  # ATen's kernel ends the process
    return torch.cat(_backward_sums(grad_output, input, mean, invstd)).to(mean.dtype)


def _backward_sums(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
) -> tuple[Tensor, Tensor]:
    _, sum_dy_xhat, sum_dy = _batch_norm_backward(
        grad_output, input, None, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return sum_dy, sum_dy_xhat


def backward_input(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    """Return the gradient of the input, `w·invstd·(dy - Σdy/N - x̂·Σdy·x̂/N)`.

    Args:
        grad_output: Shape (N, C, *), of the layout of `input`.
        input: Shape (N, C, *), dense; may be empty.
        weight: Shape (C,), or None for ones.
        mean: Mean of the whole batch, shape (C,).
        invstd: 1/sqrt(var + eps), shape (C,).
        sums: `[Σdy | Σdy·x̂]` added over all ranks, shape (2C,).
        count: Number of values per channel in the whole batch, float64 of shape (1,).
    """
    if input.numel() == 0:
        return torch.empty_like(input)
    scale = invstd if weight is None else invstd * weight
    sum_dy, sum_dy_xhat = sums.chunk(2)
    share = scale * (-1.0 / float(count))
    slope = share * invstd * sum_dy_xhat
    grad_input = _affine(input, mean, invstd, slope, share * sum_dy)
    return grad_input.addcmul_(grad_output, per_channel(scale, input)).to(input.dtype)
