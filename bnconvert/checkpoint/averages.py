"""Averages that were saved as a list without names, as `torch_ema` and diffusers save them.

The list follows `model.parameters()`, whose order is that of the state dict without its buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.names import LEAVES, layer_of
from bnconvert.checkpoint.pickle_values import as_lazy, is_tensor
from bnconvert.checkpoint.record import Weights
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bnconvert.checkpoint.tensors import LazyTensor

SHADOW = "shadow_params"


def unnamed_average(tree: dict[Any, Any], keys: Iterable[str]) -> tuple[str, list[Any]] | None:
    """Return the key and the values of a checkpoint's average without names, if it has one.

    Args:
        tree: The checkpoint.
        keys: Where averages are kept.
    """
    for key in keys:
        value = tree.get(key)
        values = value.get(SHADOW) if isinstance(value, dict) else value
        if isinstance(values, list) and values and all(map(is_tensor, values)):
            return key, values
    return None


def with_names(values: list[Any], raw: Weights) -> Weights:
    """Return an average under the names of the raw weights.

    Args:
        values: The average of each parameter, in the order of the parameters.
        raw: The trained weights. One memory under two names counts once, as torch counts it.

    Raises:
        CheckpointError: It does not fit the parameters one by one, so whose average each is cannot
            be known.
    """
    names: list[str] = []
    twins: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in raw.tensors.items():
        if layer_of(name)[1] in LEAVES[2:]:
            continue
        key = tensor.shares if tensor.shares is not None else name
        if key in first:
            twins[name] = first[key]
        else:
            first[key] = name
            names.append(name)
    if len(names) != len(values):
        raise CheckpointError(
            f"it has {len(values)} tensors for {len(names)} raw ones that are no running "
            "statistics, so which belongs to which is not known; save it with names"
        )
    averages: dict[str, LazyTensor] = {}
    for name, value in zip(names, values, strict=True):
        average, wanted = as_lazy(value), raw.tensors[name]
        if average is None or average.shape != wanted.shape:
            shape = list(average.shape) if average else None
            raise CheckpointError(
                f"in the order of the parameters {name} would have shape {shape}, not "
                f"{list(wanted.shape)}; save it with names"
            )
        averages[name] = average
    kept = [name for name in raw.tensors if name in averages or name in twins]
    tensors = {name: averages[twins.get(name, name)] for name in kept}
    return Weights(tensors, versions=dict(raw.versions))
