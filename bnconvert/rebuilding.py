"""Whether a model is still what its constructor makes, so that a folder alone can bring it back."""

from __future__ import annotations

import re
import types
from typing import TYPE_CHECKING, Any

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

    Compared are the names and shapes in the state dicts, the classes of modules, and what they
    keep as numbers, texts and functions. Norm layers, which are described apart, and dropout and
    checkpointing, which do nothing in eval mode, may differ.

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
    own, other = _layers(model), _layers(built)
    for name, module in own.items():
        if name not in other:
            return f"it holds {name}, a {type(module).__name__}"
        difference = "" if _may_differ(other[name]) else _other_settings(module, other[name])
        if difference:
            return f"{name or 'the model'} {difference}"
    missing = [name for name in other if name not in own and not _may_differ(other[name])]
    return f"it does not hold {missing[0]}, a {type(other[missing[0]]).__name__}" if missing else ""


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that count, by name; what lies within a norm layer is part of it."""
    norms = tuple(f"{name}." for name, m in model.named_modules() if kind_of(m) is not None)
    return {
        name: module
        for name, module in model.named_modules()
        if not _may_differ(module) and not f"{name}.".startswith(norms)
    }


def _may_differ(module: nn.Module) -> bool:
    return kind_of(module) is not None or "drop" in type(module).__name__.lower()


def _other_settings(module: nn.Module, built: nn.Module) -> str:
    kinds = _printed(module), _printed(built)
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]} and not {kinds[1]}"
    if type(module).__qualname__ != type(built).__qualname__:
        return f"is another {type(module).__name__}"
    if _has_other_forward(module) and not _has_other_forward(built):
        return "has a forward of its own"
    values = vars(module)
    for name, value in vars(built).items():
        if name in values and _counts(name) and _plain(value) != _plain(values[name]):
            return f"has {name} = {_plain(values[name])} and not {_plain(value)}"
    return ""


def _printed(module: nn.Module) -> str:
    """Return a leaf as it is printed, without what changes no output; the class of others."""
    leaf = f"({module.extra_repr()})" if not module._modules else ""
    return _IN_PLACE.sub("", f"{type(module).__name__}{leaf}")


_IN_PLACE = re.compile(r"(, )?inplace(=True|=False)?")


def _has_other_forward(module: nn.Module) -> bool:
    """Whether the module was given a forward, and not by accelerate, which places tensors."""
    own = vars(module).get("forward")
    if own is None or "_hf_hook" in vars(module) or "_original_forward" in vars(module):
        return False
    return getattr(own, "__func__", own) is not type(module).forward


def _counts(attribute: str) -> bool:
    """Whether an attribute may change outputs in eval mode."""
    return attribute != "training" and not _OF_TRAINING.search(attribute)


_OF_TRAINING = re.compile(r"^_|drop|checkpoint|inplace|memory|fused_attn")


def _plain(value: Any) -> Any:
    """Return what tells a number, text or function from others; None for anything else."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return value.__qualname__
    return value if isinstance(value, (bool, int, float, str)) else None


def lost_hooks(model: nn.Module) -> list[str]:
    """Return the names of modules with hooks around their forward, which no folder holds."""
    return [
        name
        for name, module in model.named_modules()
        if (module._forward_hooks or module._forward_pre_hooks) and kind_of(module) is None
    ]
