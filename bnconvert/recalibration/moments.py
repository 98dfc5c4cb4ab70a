"""Mean and variance per channel of values that come in parts, in float64.

Parts are merged by their counts (Chan, Golub and LeVeque, 1983): exact where the difference of
squares cancels, as for channels whose mean is large beside their deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each channel.

    Attributes:
        count: Values per channel.
        mean: (C,) float64, on the CPU.
        m2: (C,) float64, sum of squared deviations from the mean.
    """

    count: int
    mean: Tensor
    m2: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Return the moments of an activation.

        Args:
            values: (N, C, *), of any floating point dtype.
        """
        channels = values.shape[1]
        count = values.numel() // channels if channels else 0
        if not count:
            zero = torch.zeros(channels, dtype=torch.float64)
            return cls(0, zero, zero)
        # Some accelerators have no float64.
        wide = values.detach() if values.device.type in ("cpu", "cuda") else values.detach().cpu()
        dims = [dim for dim in range(values.ndim) if dim != 1]
        var, mean = torch.var_mean(wide.double(), dim=dims, correction=0)
        return cls(count, mean.cpu(), var.cpu() * count)

    @property
    def variance(self) -> Tensor:
        """The biased variance, which normalizes."""
        return self.m2 / self.count

    @property
    def unbiased_variance(self) -> Tensor:
        """The unbiased variance, which `running_var` holds; needs two values."""
        return self.m2 / (self.count - 1)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both parts together."""
        if not other.count:
            return self
        if not self.count:
            return other
        count = self.count + other.count
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.count / count)
        m2 = self.m2 + other.m2 + shift.square() * (self.count * other.count / count)
        return Moments(count, mean, m2)


def merged(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all parts together; at least one is needed."""
    first, *others = parts
    for part in others:
        first = first.merge(part)
    return first
