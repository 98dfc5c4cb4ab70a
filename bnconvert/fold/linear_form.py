"""Sums of convolutions and multiples of one input, and the one convolution that computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.fold.norms import NormCall


@dataclass(frozen=True)
class Geometry:
    """Where a kernel's taps fall: everything about a convolution but its weight."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class LinearForm:
    """`sum of convs + diagonal * x + shift`, linear in one input x.

    Attributes:
        convs: Weights in float64, each with its geometry.
        diagonal: One factor per channel, or None.
        shift: One value per channel, or a single one.
        norms: Norms that are part of the form.
    """

    convs: tuple[tuple[Tensor, Geometry], ...]
    diagonal: Tensor | None
    shift: Tensor
    norms: tuple[NormCall, ...] = ()

    @property
    def terms(self) -> int:
        """The number of branches."""
        return len(self.convs) + (self.diagonal is not None)

    def scaled(self, factor: Tensor) -> LinearForm:
        """Return the form with its result multiplied per channel."""
        convs = tuple(
            (weight * factor.reshape((-1,) + (1,) * (weight.ndim - 1)), geometry)
            for weight, geometry in self.convs
        )
        diagonal = None if self.diagonal is None else self.diagonal * factor
        return replace(self, convs=convs, diagonal=diagonal, shift=self.shift * factor)

    def plus(self, other: LinearForm) -> LinearForm:
        """Return the sum of two forms."""
        diagonals = [form.diagonal for form in (self, other) if form.diagonal is not None]
        return LinearForm(
            self.convs + other.convs,
            diagonals[0] + diagonals[-1] if len(diagonals) == 2 else (diagonals or [None])[0],  # type: ignore[list-item]
            self.shift + other.shift,
            self.norms + other.norms,
        )


def zero() -> Tensor:
    """Return the shift of a form that has none."""
    return torch.zeros((), dtype=torch.float64)


def number(value: float) -> Tensor:
    """Return a factor for all channels."""
    return torch.tensor(value, dtype=torch.float64)


def combine(form: LinearForm, rank: int) -> tuple[Tensor, Geometry] | None:
    """Lay all kernels over each other; None where their taps do not fall on one grid."""
    if not form.convs:
        return None
    (largest, geometry), *_ = sorted(form.convs, key=lambda conv: -conv[0].numel())
    total = torch.zeros_like(largest)
    size = 0
    for weight, own in form.convs:
        window = _window(weight, own, largest, geometry)
        if window is None:
            return None
        total[window] += weight
        size += weight.numel()
    if form.diagonal is not None:
        eye = _identity(form.diagonal, largest, geometry.groups)
        plain = Geometry((1,) * (rank - 2), (0,) * (rank - 2), geometry.dilation, geometry.groups)
        window = None if eye is None else _window(eye, plain, largest, geometry)
        if eye is None or window is None:
            return None
        total[window] += eye
    return (total, geometry) if total.numel() <= size else None


def _identity(diagonal: Tensor, like: Tensor, groups: int) -> Tensor | None:
    """Return the kernel of size 1 that multiplies each channel, or None if channels change."""
    outputs, width = like.shape[:2]
    if outputs != width * groups or len(diagonal) not in (1, outputs):
        return None
    eye = torch.eye(width, dtype=torch.float64).repeat(groups, 1)
    return (eye * diagonal.reshape(-1, 1)).reshape(outputs, width, *(1,) * (like.ndim - 2))


def _window(
    weight: Tensor, own: Geometry, largest: Tensor, geometry: Geometry
) -> tuple[slice, ...] | None:
    """Return where a kernel lies inside the largest one, or None if it does not fit."""
    if own.stride != geometry.stride or own.groups != geometry.groups:
        return None
    if weight.shape[:2] != largest.shape[:2]:
        return None
    window = [slice(None), slice(None)]
    for axis, (padding, outer) in enumerate(zip(own.padding, geometry.padding, strict=True)):
        taps, dilation = weight.shape[axis + 2], geometry.dilation[axis]
        start, rest = divmod(outer - padding, dilation)
        if rest or start < 0 or start + taps > largest.shape[axis + 2]:
            return None
        if taps > 1 and own.dilation[axis] != dilation:
            return None
        window.append(slice(start, start + taps))
    return tuple(window)
