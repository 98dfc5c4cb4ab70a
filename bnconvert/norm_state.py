"""What a state dict does not say about norm layers, as plain data for `config.json`.

For each BatchNorm layer: whether it is plain, synchronised or frozen, its eps, its momentum, and
whether it uses the running statistics that it holds. What another library has frozen comes back
frozen by bnconvert, which does the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert.convert import convert_sync_batchnorm
from bnconvert.errors import BnconvertError
from bnconvert.freeze import freeze_batchnorm
from bnconvert.layers import Kind
from bnconvert.layers.frozen import frozen_state
from bnconvert.layers.group import GROUP_KEY
from bnconvert.walk import find_norms

if TYPE_CHECKING:
    from torch import nn

_OURS = (Kind.PLAIN, Kind.SYNC, Kind.FROZEN)
_DEFAULT_MOMENTUM = 0.1


def describe_norms(model: nn.Module) -> list[dict[str, Any]]:
    """Return one entry per BatchNorm layer that bnconvert can put into this state again."""
    entries = []
    for norm in find_norms(model):
        layer: Any = norm.module
        if norm.kind is Kind.FOREIGN_FROZEN and hasattr(layer, "eps"):
            entries.append(
                {
                    "name": norm.name,
                    "eps": float(layer.eps),
                    "momentum": _DEFAULT_MOMENTUM,
                    "synchronized": False,
                    "frozen_stats": True,
                    "frozen_affine": True,
                }
            )
        elif norm.kind in _OURS:
            state, momentum = frozen_state(layer), layer.momentum
            entries.append(
                {
                    "name": norm.name,
                    "eps": float(layer.eps),
                    "momentum": None if momentum is None else float(momentum),
                    "track_running_stats": layer.track_running_stats,
                    "synchronized": GROUP_KEY in layer.__dict__,
                    "frozen_stats": state is not None and state.stats,
                    "frozen_affine": state is not None and state.requires_grad is not None,
                }
            )
    return entries


def restore_norms(model: nn.Module, entries: list[dict[str, Any]]) -> None:
    """Bring the layers of a plain model into the recorded state, in place.

    Args:
        model: A model with the same layers as the described one.
        entries: From `describe_norms`.

    Raises:
        BnconvertError: A recorded layer is not in the model.
    """
    layers = {name: norm.module for norm in find_norms(model) for name in norm.names}
    own = {name for norm in find_norms(model) if norm.kind in _OURS for name in norm.names}
    for entry in entries:
        if entry["name"] not in layers:
            raise BnconvertError(
                f"{entry['name']}: is recorded as a BatchNorm layer but the model has none there; "
                "the weights are of another architecture"
            )
        layer: Any = layers[entry["name"]]
        layer.eps, layer.momentum = entry["eps"], entry["momentum"]
        if "track_running_stats" in entry:
            layer.track_running_stats = entry["track_running_stats"]

    def having(key: str) -> list[str]:
        return [entry["name"] for entry in entries if entry[key] and entry["name"] in own]

    if having("synchronized"):
        convert_sync_batchnorm(model, include=_among(having("synchronized")), on_unknown="skip")
    if having("frozen_stats"):
        freeze_batchnorm(model, affine=False, include=_among(having("frozen_stats")))
    if having("frozen_affine"):
        freeze_batchnorm(model, stats=False, include=_among(having("frozen_affine")))


def _among(names: list[str]) -> Any:
    chosen = set(names)
    return lambda name, module: name in chosen
