"""The layer that stands for an activation across which a BatchNorm was folded."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ChannelClamp(nn.Module):
    """Limits each channel to a range of its own: `min(max(x, lower), upper)`.

    A BatchNorm followed by ReLU equals this clamp followed by a per-channel affine map
    (`bnconvert.fold.algebra`), which the layers after it take in.

    Args:
        lower: Lower bounds, of a shape that broadcasts against the input; may hold -inf.
        upper: Upper bounds, likewise.
    """

    lower: Tensor
    upper: Tensor

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        super().__init__()
        self.register_buffer("lower", lower)
        self.register_buffer("upper", upper)

    def forward(self, x: Tensor) -> Tensor:
        """Return the clamped input; never written in place."""
        return torch.clamp(x, self.lower, self.upper)

    def extra_repr(self) -> str:
        """Describe the bounds' shape."""
        return f"shape={tuple(self.lower.shape)}"
