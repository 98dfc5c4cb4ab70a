"""Whether a model is still what its constructor makes, so that a folder alone can bring it back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import nn

from bnconvert.errors import BnconvertError
from bnconvert.layers.kinds import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTER = "num_batches_tracked"
"""Loading goes without it, as frozen layers of other libraries have none."""


def first_difference(model: nn.Module, build: Callable[[], nn.Module]) -> str:
    """Return how a model differs from one that is built anew, as a sentence, or "".

    Compared are the names and shapes in the state dicts, and the classes and settings of layers.
    Norm layers, which are described apart, and dropout, which does nothing in eval mode, may
    differ.

    Args:
        model: The model.
        build: Builds the other; called on the meta device where that works.
    """
    try:
        built = _built(build)
    except BnconvertError as error:
        return f"the model cannot be built ({error})"
    return _other_tensor(model, built) or _other_layer(model, built)


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


def _other_layer(model: nn.Module, built: nn.Module) -> str:
    own, other = dict(model.named_modules()), dict(built.named_modules())
    for name in {**own, **other}:
        mine, theirs = own.get(name), other.get(name)
        if mine is None or theirs is None or _may_differ(mine) or _may_differ(theirs):
            continue
        kinds = _settings(mine), _settings(theirs)
        if kinds[0] != kinds[1]:
            return f"{name} is {kinds[0]} and not {kinds[1]}"
    return ""


def _settings(module: nn.Module) -> str:
    """Return a leaf as it is printed, without what changes no output; the class of others."""
    leaf = f"({module.extra_repr()})" if not module._modules else ""
    return _IN_PLACE.sub("", f"{type(module).__name__}{leaf}")


_IN_PLACE = re.compile(r"(, )?inplace(=True|=False)?")


def _may_differ(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return bool(module._modules) or kind_of(module) is not None or "drop" in name
