"""Whether a model is still what its constructor makes, so that a folder alone can bring it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTER = "num_batches_tracked"
"""Loading goes without it, as frozen layers of other libraries have none."""


def first_difference(model: nn.Module, build: Callable[[], nn.Module]) -> str:
    """Return how a model differs from one that is built anew, as a sentence, or "".

    Compared are the names and shapes in the state dicts, and the classes of activations.

    Args:
        model: The model.
        build: Builds the other; called on the meta device where that works.
    """
    try:
        built = _built(build)
    except BnconvertError as error:
        return f"the model cannot be built ({error})"
    return _other_tensor(model, built) or _other_activation(model, built)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # constructors that compute with their values cannot run there
        return build()


def _other_tensor(model: nn.Module, built: nn.Module) -> str:
    own, other = _shapes(model), _shapes(built)
    for name, shape in own.items():
        if name not in other:
            return f"it holds {name}"
        if shape != other[name]:
            return f"{name} has shape {list(shape)} and not {list(other[name])}"
    missing = [name for name in other if name not in own]
    return f"it does not hold {missing[0]}" if missing else ""


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    tensors = model.state_dict(keep_vars=True).items()
    return {name: tensor.shape for name, tensor in tensors if not name.endswith(_COUNTER)}


def _other_activation(model: nn.Module, built: nn.Module) -> str:
    other = dict(built.named_modules())
    for name, module in model.named_modules():
        counterpart = other.get(name)
        if counterpart is None or not (_is_activation(module) and _is_activation(counterpart)):
            continue
        if type(module) is not type(counterpart):
            kinds = type(module).__name__, type(counterpart).__name__
            return f"{name} is {kinds[0]} and not {kinds[1]}"
    return ""


def _is_activation(module: nn.Module) -> bool:
    own = type(module).__module__
    return own == "torch.nn.modules.activation" or own.startswith("timm.layers.activations")
