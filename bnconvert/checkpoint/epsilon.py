"""The eps of BatchNorm layers: a state dict does not hold it, so file and model may disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.checkpoint.record import Fact, Weights
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

EPS_TOLERANCE = 1e-6
"""Relative difference that float32 storage explains (1e-3 is kept as 0.0010000000475)."""


def match_eps(path: Path, weights: Weights, model: nn.Module, choice: str | None) -> dict[str, str]:
    """Settle the eps of layers where the file and the model say different things.

    Args:
        path: For the message.
        weights: Facts are replaced by the model's where those are chosen.
        model: The target; not changed.
        choice: "from-file", "from-model" or None.

    Returns:
        What was settled, by layer.

    Raises:
        CheckpointError: They differ and nothing was chosen.
    """
    differing: dict[str, tuple[float, float]] = {}
    for name, module in model.named_modules():
        fact = weights.bn.get(name, {}).get("eps")
        own = getattr(module, "eps", None)
        if fact is None or not isinstance(own, float) or not isinstance(fact.value, (int, float)):
            continue
        if abs(fact.value - own) > EPS_TOLERANCE * max(abs(own), abs(fact.value)):
            differing[name] = (float(fact.value), own)
    if differing and choice is None:
        name, (stored, own) = next(iter(differing.items()))
        raise CheckpointError(
            f"{path}: {name} has eps {stored:g} in the file and {own:g} in the model"
            f"{f' ({len(differing)} layers differ)' if len(differing) > 1 else ''}; say which "
            "counts with --eps from-file or --eps from-model"
        )
    if choice == "from-model":
        for name, (_, own) in differing.items():
            weights.bn[name] = {**weights.bn[name], "eps": Fact(own, "the target model")}
    return {
        name: f"eps {stored:g} in the file, {own:g} in the model; {choice} counts"
        for name, (stored, own) in differing.items()
    }
