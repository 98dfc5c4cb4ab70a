"""The algebra of folding: per-channel affine maps and what they do to linear operations.

Eval-mode BatchNorm is `y = scale * x + shift` for each channel, with

    scale = weight / sqrt(running_var + eps),    shift = bias - running_mean * scale

(Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 2). For a linear operation
`z = W x + b`:

    affine after it:     scale * (W x + b) + shift  =  (scale W) x + (scale b + shift)
    affine before it:    W (scale x + shift) + b    =  (W scale) x + (b + W shift)

and for a function that limits its input to [low, high], such as ReLU,

    limit(scale x + shift, low, high)  =  outer_scale * clamp(x, lower, upper) + outer_shift

for any sign of the scale. Everything here is computed in float64 from the stored tensors and cast
once, by `cast`, at the very end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bnconvert.errors import BnconvertError


def exact(tensor: Tensor) -> Tensor:
    """Return the tensor's values as float64 on the CPU, detached from its graph."""
    return tensor.detach().to("cpu", torch.float64)


@dataclass(frozen=True)
class Affine:
    """The map `y = scale * x + shift`, one scale and one shift per channel.

    Attributes:
        scale: float64, shape (C,).
        shift: float64, shape (C,).
    """

    scale: Tensor
    shift: Tensor

    def then(self, after: Affine) -> Affine:
        """Return the map that applies this one first and `after` second."""
        return Affine(after.scale * self.scale, after.scale * self.shift + after.shift)

    def take(self, channels: Tensor) -> Affine:
        """Return the map of the channels with these numbers, the identity where one is -1.

        Args:
            channels: Integers of any shape; the scale and shift returned have this shape.
        """
        index = channels.to(torch.int64)
        touched = index >= 0
        index = index.clamp(min=0)
        return Affine(
            torch.where(touched, self.scale[index], 1.0),
            torch.where(touched, self.shift[index], 0.0),
        )

    @property
    def scale_only(self) -> Affine:
        """The same map without its shift."""
        return Affine(self.scale, torch.zeros_like(self.shift))


def batchnorm_affine(
    mean: Tensor, var: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> Affine:
    """Return what BatchNorm with these running statistics does in eval mode.

    Args:
        mean: Running mean, shape (C,).
        var: Running variance, shape (C,).
        eps: Added to the variance.
        weight: Shape (C,); None is all ones.
        bias: Shape (C,); None is all zeros.
    """
    scale = torch.rsqrt(exact(var) + eps)
    if weight is not None:
        scale = exact(weight) * scale
    shift = -exact(mean) * scale
    if bias is not None:
        shift = exact(bias) + shift
    return Affine(scale, shift)


@dataclass(frozen=True)
class Layout:
    """How the channels of a linear operation lie in its weight.

    Attributes:
        transposed: False for conv and Linear, weight (out, in / groups, *kernel); True for
            transposed convs, weight (in, out / groups, *kernel), and for the right-hand side of a
            matrix product, (in, out).
        groups: Number of channel groups.
    """

    transposed: bool = False
    groups: int = 1

    def channels(self, weight: Tensor) -> tuple[int, int]:
        """Return the number of output and of input channels."""
        first, second = weight.shape[0], weight.shape[1] * self.groups
        return (second, first) if self.transposed else (first, second)

    def per_output(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return one value per output channel, shaped to multiply the weight."""
        if self.transposed:
            return self._per_group(values, weight)
        return _per_row(values, weight)

    def per_input(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return one value per input channel, shaped to multiply the weight."""
        if self.transposed:
            return _per_row(values, weight)
        return self._per_group(values, weight)

    def through(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return the result, per output channel, for an input that is constant in each channel.

        That is `W values` with the kernel summed. For a transposed conv it holds where every
        output sees the whole kernel, which is the case for a matrix product only.
        """
        product = weight * self.per_input(values, weight)
        if not self.transposed:
            return product.flatten(1).sum(1)
        rows = product.flatten(2).sum(2) if product.ndim > 2 else product
        return rows.reshape(self.groups, -1, rows.shape[1]).sum(1).flatten()

    def _per_group(self, values: Tensor, weight: Tensor) -> Tensor:
        """Values (groups * weight.shape[1],) -> (weight.shape[0], weight.shape[1], 1, ...)."""
        rows = values.reshape(self.groups, weight.shape[1])
        rows = rows.repeat_interleave(weight.shape[0] // self.groups, dim=0)
        return rows.reshape(rows.shape + (1,) * (weight.ndim - 2))


def _per_row(values: Tensor, weight: Tensor) -> Tensor:
    return values.reshape((-1,) + (1,) * (weight.ndim - 1))


def absorb_after(
    weight: Tensor, bias: Tensor | None, affine: Affine, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return weight and bias, in float64, of the operation followed by the affine map."""
    weight = exact(weight)
    moved = affine.shift if bias is None else affine.scale * exact(bias) + affine.shift
    return weight * layout.per_output(affine.scale, weight), moved


def absorb_before(
    weight: Tensor, bias: Tensor | None, affine: Affine, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return weight and bias, in float64, of the affine map followed by the operation.

    The shift is carried over exactly only where no input is a padding zero.
    """
    weight = exact(weight)
    moved = layout.through(affine.shift, weight)
    if bias is not None:
        moved = moved + exact(bias)
    return weight * layout.per_input(affine.scale, weight), moved


@dataclass(frozen=True)
class Limits:
    """A per-channel clamp and the affine map after it.

    Attributes:
        lower: float64, shape (C,).
        upper: float64, shape (C,).
        outer: The map that is applied to the clamped value.
    """

    lower: Tensor
    upper: Tensor
    outer: Affine


def swap_with_limits(affine: Affine, low: float, high: float, dtype: torch.dtype) -> Limits:
    """Return the clamp that goes before an affine map in place of [low, high] after it.

    For scale > 0 the bounds are `(low - shift) / scale` and `(high - shift) / scale`, for
    scale < 0 they change places. A channel that the limits hold at one value (scale 0, or a bound
    that no finite number of `dtype` passes) becomes that constant.

    Args:
        affine: The map before the limits.
        low: Least value of the function; may be -inf.
        high: Largest value of the function; may be inf.
        dtype: The dtype of the values that are clamped.
    """
    largest = torch.finfo(dtype).max
    scale, shift = affine.scale, affine.shift
    rising = scale > 0
    divisor = torch.where(scale == 0, 1.0, scale)
    at_low, at_high = (low - shift) / divisor, (high - shift) / divisor
    lower, upper = torch.where(rising, at_low, at_high), torch.where(rising, at_high, at_low)
    above, below = lower > largest, upper < -largest
    held = torch.where(above == rising, torch.full_like(scale, low), high)
    constant = torch.where(scale == 0, shift.clamp(low, high), held)
    fixed = (scale == 0) | above | below
    return Limits(
        torch.where(fixed, 0.0, torch.where(lower < -largest, -math.inf, lower)),
        torch.where(fixed, 0.0, torch.where(upper > largest, math.inf, upper)),
        Affine(torch.where(fixed, 0.0, scale), torch.where(fixed, constant, shift)),
    )


def cast(values: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Return float64 values in another dtype.

    Args:
        values: The values; the first dimension is the channel in error texts.
        dtype: The dtype to cast to, with rounding to nearest.
        where: What the values are, for error texts.

    Raises:
        BnconvertError: A value is not finite, or is beyond the largest number of the dtype.
    """
    result = values.to(dtype)
    bad = ~result.isfinite()
    if bad.any():
        place = bad.nonzero()[0].tolist()
        value = values[tuple(place)].item()
        what = "is not finite" if not math.isfinite(value) else f"overflows {_name(dtype)}"
        raise BnconvertError(
            f"{where}: channel {place[0] if place else 0} has the value {value:.6g}, which {what}; "
            "correct the layer's weights or statistics, or exclude it"
        )
    return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
