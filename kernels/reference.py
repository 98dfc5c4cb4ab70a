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

import torch
from torch import Tensor

aten = torch.ops.aten

_ILL_CONDITIONED = 64.0
"""|mean|/sd above which `x·a + b` loses digits that `(x - mean)·a + b'` keeps."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return `values` of shape (C,) in a shape that broadcasts over dimension 1 of `like`."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))


def local_sums(input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
    """Return this rank's sums.

    Args:
        input: Values of shape (N, C, *); may be empty.

    Returns:
        float64 of shape (2C + 1,): `[n·mean | M2 + n·mean² | n]`.
    """
    channels = input.shape[1]
    if input.numel() == 0:
        return input.new_zeros(2 * channels + 1, dtype=torch.float64)
    count = input.numel() // channels
    mean, var = _mean_and_variance(input)
    sums = torch.empty(2 * channels + 1, dtype=torch.float64, device=input.device)
    torch.mul(mean, count, out=sums[:channels])
    torch.add(var, mean.square(), out=sums[channels:-1]).mul_(count)
    sums[-1] = count
    return sums


def _mean_and_variance(input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Return the float64 mean and biased variance of each channel.

    ATen sums contiguous float32 and float64 planes in float64. Elsewhere it sums in the dtype of
    the input, one value after another. So channels that lie side by side are summed in short
    pieces, and the first value of each channel is subtracted before, in float32, where the input
    is narrower or its mean is far from zero.
    """
    dtype = statistics_dtype(input.dtype)
    planes = input.dim() > 2 and input.is_contiguous()
    if planes and input.dtype == dtype:
        mean, var = aten.batch_norm_update_stats(input, None, None, 0.0)
        return mean.double(), var.double()
    if not planes and input.dtype == dtype:
        mean, var = _statistics_of_rows(input.movedim(1, -1).reshape(-1, input.shape[1]))
        if not bool((mean.abs() > _ILL_CONDITIONED * var.sqrt()).any()):
            return mean, var
    shift = input.detach()[0].reshape(input.shape[1], -1)[:, 0].to(dtype)
    if planes:
        mean, var = aten.batch_norm_update_stats(input - per_channel(shift, input), None, None, 0.0)
        return mean.double() + shift.double(), var.double()
    mean, var = _statistics_of_rows(input.movedim(1, -1).reshape(-1, input.shape[1]) - shift)
    return mean + shift.double(), var


_PIECE = 128
"""Values added one after another in float32; more pieces cost more float64 additions."""


def _statistics_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float64 mean and biased variance over dimension 0 of a contiguous (M, C) tensor.

    Every `pieces`-th row belongs to one piece, so that all pieces of all channels are the channels
    of one tensor in channels-last layout.
    """
    count, channels = rows.shape
    pieces = count // _PIECE
    parts = []
    if pieces:
        parts.append((_PIECE, rows[: pieces * _PIECE].view(_PIECE, pieces * channels)))
    if count % _PIECE:
        parts.append((count % _PIECE, rows[pieces * _PIECE :]))
    sums = []
    for size, part in parts:
        image = part.view(1, size, 1, part.shape[1]).permute(0, 3, 1, 2)
        mean, var = aten.batch_norm_update_stats(image, None, None, 0.0)
        sums.append((size, mean.double().view(-1, channels), var.double().view(-1, channels)))
    mean = sum(size * part.sum(0) for size, part, _ in sums) / count
    squares = sum(size * (var + (part - mean).square()).sum(0) for size, part, var in sums)
    return mean, squares / count


def finalize(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics of the batch that reduced sums describe.

    Args:
        sums: float64 of shape (2C + 1,), as from `local_sums`, added over all ranks.
        dtype: dtype of the input.

    Returns:
        Mean and biased variance of shape (C,) in float64, and the count of values per channel,
        float64 of shape (1,). Without any value the mean and the variance are zero.
    """
    count = sums[-1:]
    divisor = count.clamp(min=1.0)
    mean, mean_of_squares = (sums[:-1] / divisor).chunk(2)
    # Rounding can take a variance of zero below zero, never a batch's own variance.
    return mean, (mean_of_squares - mean.square()).clamp(min=0.0), count


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
        num_batches_tracked.add_((count[0] > 0).to(num_batches_tracked.dtype))
    factor: Tensor | float
    if momentum is not None:
        factor = momentum
    elif num_batches_tracked is not None:
        factor = num_batches_tracked.double().clamp(min=1.0).reciprocal()
    else:
        factor = 0.0
    unbiased = var * (count / (count - 1.0).clamp(min=1.0))
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
    var: Tensor,
    eps: float,
) -> Tensor:
    """Return `weight·(input - mean)/sqrt(var + eps) + bias` in the dtype and layout of `input`.

    Args:
        input: Shape (N, C, *), dense; may be empty.
        weight: Shape (C,), or None for ones.
        bias: Shape (C,), or None for zeros.
        mean: float64 of shape (C,).
        var: float64 of shape (C,).
        eps: Added to the variance.
    """
    if input.numel() == 0:
        return torch.empty_like(input)
    dtype = statistics_dtype(input.dtype)
    if weight is not None and input.dtype != torch.float64:
        _check_affine_dtype(input, weight)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    source, mean = _centred(input, mean, (var + eps).rsqrt())
    output: Tensor = aten.native_batch_norm(
        source, weight, bias, mean.to(dtype), var.to(dtype), False, 0.0, eps
    )[0]
    return output.to(input.dtype)


def _check_affine_dtype(input: Tensor, weight: Tensor) -> None:  # noqa: A002
    """Refuse what torch refuses: a weight of another dtype than the input's or float32."""
    if weight.dtype not in (input.dtype, torch.float32):
        raise RuntimeError(
            f"expected weight of dtype {input.dtype} or float32 for input of dtype {input.dtype}, "
            f"but got {weight.dtype}"
        )


def _centred(input: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Subtract the mean beforehand where ATen's `input·a + b` would cancel; a check on C values."""
    if not bool((mean.abs() * invstd).max() > _ILL_CONDITIONED):
        return input, mean
    shift = mean.to(statistics_dtype(input.dtype))
    return input - per_channel(shift, input), mean - shift.double()


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
    channels = input.shape[1]
    if input.numel() == 0:  # ATen's kernel ends the process on an empty tensor.
        return mean.new_zeros(2 * channels)
    _, grad_weight, grad_bias = aten.native_batch_norm_backward(
        grad_output,
        input,
        torch.ones_like(mean),
        None,
        None,
        mean,
        invstd,
        True,
        0.0,
        [False, True, True],
    )
    return torch.cat((grad_bias, grad_weight)).to(mean.dtype)


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
    sum_dy, sum_dy_xhat = (sums.double() / count.clamp(min=1.0)).chunk(2)
    invstd64 = invstd.double()
    scale = invstd64 if weight is None else invstd64 * weight.double()
    slope = -scale * sum_dy_xhat * invstd64
    source, centre = _centred(input, mean.double(), invstd64)
    offset = -scale * sum_dy - slope * centre
    scale, slope, offset = (t.to(mean.dtype) for t in (scale, slope, offset))
    if source.dtype == mean.dtype:  # vectorized in every layout, unlike addcmul
        zeros, ones = torch.zeros_like(mean), torch.ones_like(mean)
        applied = aten.native_batch_norm(source, slope, offset, zeros, ones, False, 0.0, 0.0)
        grad_input: Tensor = applied[0]
    else:
        grad_input = torch.addcmul(per_channel(offset, input), source, per_channel(slope, input))
    return grad_input.addcmul_(grad_output, per_channel(scale, input)).to(input.dtype)
