"""Comparing a model before and after folding: outputs, and where they first differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnconvert.arguments import Arguments, output_tensors
from bnconvert.errors import VerificationError

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 1e-9
"""Largest relative difference in float64 that a fold may make."""


@dataclass(frozen=True)
class Proof:
    """How far a folded model is from the original.

    Attributes:
        float64: Largest relative difference with everything computed in float64.
        own_dtype: The same in the model's own dtype; None where it cannot run there.
    """

    float64: float
    own_dtype: float | None


def relative_difference(before: Any, after: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest value of each tensor.

    Outputs that are not finite in the same places count as equal there; a mismatch in structure,
    shape or finiteness is an infinite difference.
    """
    tensors, others = output_tensors(before), output_tensors(after)
    if len(tensors) != len(others):
        return float("inf")
    return max(map(_difference, tensors, others), default=0.0)


def _difference(before: Tensor, after: Tensor) -> float:
    if before.shape != after.shape:
        return float("inf")
    if not before.is_floating_point():
        return 0.0 if torch.equal(before, after) else float("inf")
    one, two = before.detach().double(), after.detach().double()
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()) or not torch.equal(
        one[~finite].nan_to_num(nan=1.0), two[~finite].nan_to_num(nan=1.0)
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = (one[finite] - two[finite]).abs().max().item()
    largest = one[finite].abs().max().item()
    return difference / largest if largest else difference


def random_like(arguments: Arguments, seed: int) -> Arguments:
    """Return arguments whose floating point tensors are normal random values of the same spread."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        spread = tensor.double().std(correction=0).nan_to_num().cpu() if tensor.numel() else 1.0
        return (noise * (spread or 1.0)).to(tensor.device, tensor.dtype)

    return arguments.map(draw)


def check(differences: Sequence[float], where: str) -> float:
    """Return the largest difference.

    Raises:
        VerificationError: It is beyond the limit.
    """
    largest = max(differences)
    if not largest <= LIMIT:
        raise VerificationError(
            f"fold: in float64 the folded model differs from the original by {largest:.3g}, "
            f"relative to the largest value, and {LIMIT:g} is allowed{where}; nothing was changed"
        )
    return largest
