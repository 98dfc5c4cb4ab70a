"""What the tests of synchronised layers share."""

from __future__ import annotations

import torch
from torch import Tensor


def layout(tensor: Tensor, name: str) -> Tensor:
    """Return equal values in another memory layout."""
    if name == "channels_last" and tensor.dim() in (4, 5):
        kind = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=kind)
    if name == "strided":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if name == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


def flat(values: Tensor) -> Tensor:
    """Return (N, C, *) values as (1, C, N * ...) in float64."""
    channels = values.shape[1]
    return values.double().movedim(1, 0).reshape(1, channels, -1)
