"""Residual and activation in ATen operators, where our kernels do not do them in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def apply(normalized: Tensor, residual: Tensor | None, name: str, negative_slope: float) -> Tensor:
    """Return `activation(normalized + residual)`; `normalized` may be changed in place.

    Args:
        normalized: Shape (N, C, *).
        residual: Of the same shape and dtype, or None.
        name: "none", "relu", "leaky_relu" or "silu".
        negative_slope: Slope below zero, of "leaky_relu".
    """
    if residual is not None:
        normalized += residual
    if name == "relu":
        return aten.relu_(normalized)  # type: ignore[no-any-return]
    if name == "leaky_relu":
        return aten.leaky_relu_(normalized, negative_slope)  # type: ignore[no-any-return]
    if name == "silu":
        return aten.silu_(normalized)  # type: ignore[no-any-return]
    return normalized


def gradient(grad_output: Tensor, before: Tensor, name: str, negative_slope: float) -> Tensor:
    """Return the gradient of what the activation was applied to.

    Args:
        grad_output: Shape (N, C, *).
        before: The input of the activation, of the same shape.
        name: As for `apply`.
        negative_slope: As for `apply`.
    """
    if name == "relu":
        return aten.threshold_backward(grad_output, before, 0.0)  # type: ignore[no-any-return]
    if name == "leaky_relu":
        return aten.leaky_relu_backward(  # type: ignore[no-any-return]
            grad_output, before, negative_slope, False
        )
    if name == "silu":
        return aten.silu_backward(grad_output, before)  # type: ignore[no-any-return]
    return grad_output
