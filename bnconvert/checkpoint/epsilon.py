"""The eps of BatchNorm layers: a state dict does not hold it, so file and model may disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.checkpoint.names import batchnorm_layers
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
        weights: Facts are replaced and completed by the model's where those are chosen.
        model: The target; not changed.
        choice: "from-file", "from-model" or None.

    Returns:
        What was settled, by layer.

    Raises:
        CheckpointError: They differ and nothing was chosen, or the file was chosen and has none.
    """
    differing: dict[str, tuple[float, float]] = {}
    layers = batchnorm_layers(weights.tensors)
    told: dict[str, str] = {}
    for name, module in model.named_modules():
        fact = weights.bn.get(name, {}).get("eps")
        own = getattr(module, "eps", None)
        if not isinstance(own, float):
            continue
        if fact is None and choice == "from-model" and name in layers:
            weights.bn[name] = {**weights.bn.get(name, {}), "eps": Fact(own, "the target model")}
            told[name] = f"eps {own:g} from the model; the file has none"
        if fact is None or not isinstance(fact.value, (int, float)):
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
    if (
        choice == "from-file"
        and layers
        and not any("eps" in facts for facts in weights.bn.values())
    ):
        raise CheckpointError(
            f"{path}: eps should come from the file, which has none for {len(layers)} layers; "
            "use --eps from-model"
        )
    if choice == "from-model":
        for name, (_, own) in differing.items():
            weights.bn[name] = {**weights.bn[name], "eps": Fact(own, "the target model")}
    return told | {
        name: f"eps {stored:g} in the file, {own:g} in the model; {choice} counts"
        for name, (stored, own) in differing.items()
    }
