"""A second model with the same structure and tensors of its own, for trying edits on.

`copy.deepcopy` fails on models whose modules hold computed tensors, as pruned and weight-normed
layers do once they have run, and on whatever else in them cannot be copied. A mirror copies
modules, the containers that hold modules or tensors, and functions that are bound to them;
everything else is shared with the original.
"""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_COMPILED = "_compiled_call_impl"
"""Attribute of a module that was compiled in place; it would run the original."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def mirror(model: ModuleT, dtype: torch.dtype | None = None) -> ModuleT:
    """Return a mirror of a model.

    Args:
        model: Not changed.
        dtype: Cast floating point tensors to it; None keeps their dtypes.
    """
    copied: ModuleT = _Mirror(dtype).copy(model)
    return copied


class _Uncompiled(nn.Module):
    """Stands for a part that `torch.compile` wraps, with the same names; runs it as it is."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._orig_mod = original
        self.training = original.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


class _Mirror:
    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # ids in the memo stay valid

    def copy(self, value: Any) -> Any:
        """Return the counterpart of a value, the same one for the same value."""
        key = id(value)
        if key in self._memo:
            return self._memo[key]
        if isinstance(value, Tensor):
            return self._keep(value, self._tensor(value))
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list):
            items = self._keep(value, _empty(value))
            items.extend(self.copy(item) for item in value)
            return items
        if isinstance(value, (tuple, set, frozenset)):
            return self._keep(value, self._frozen(value))
        return self._callable(value)

    def _keep(self, value: Any, counterpart: Any) -> Any:
        self._memo[id(value)] = counterpart
        self._alive.append(value)
        return counterpart

    def _tensor(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        if self._dtype is not None and plain.is_floating_point():
            plain = plain.to(self._dtype)
        plain = plain.clone() if plain.data_ptr() == tensor.data_ptr() else plain
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(plain, requires_grad=tensor.requires_grad)
        return plain

    def _module(self, module: nn.Module) -> nn.Module:
        if "_orig_mod" in module._modules:
            return self._keep(module, _Uncompiled(self.copy(module._orig_mod)))  # type: ignore[no-any-return]
        # not through the class's own __new__, which of an fx.GraphModule makes another class
        counterpart: nn.Module = self._keep(module, object.__new__(type(module)))
        for name, value in module.__dict__.items():
            counterpart.__dict__[name] = None if name == _COMPILED else self.copy(value)
        return counterpart

    def _dict(self, value: dict[Any, Any]) -> Any:
        items = self._keep(value, _empty(value))
        for name, item in value.items():
            items[name] = self.copy(item)
        return items

    def _frozen(self, value: Any) -> Any:
        items = [self.copy(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)

    def _callable(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner = self.copy(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            args, kwargs = self.copy(value.args), self.copy(value.keywords)
            return functools.partial(self.copy(value.func), *args, **kwargs)
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._keep(value, self._closure(value))
        return value

    def _closure(self, function: types.FunctionType) -> types.FunctionType:
        cells = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                return function
            holds = isinstance(content, (nn.Module, Tensor, types.MethodType, list, dict, tuple))
            cells.append(types.CellType(self.copy(content)) if holds else cell)
        counterpart = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(cells),
        )
        counterpart.__kwdefaults__ = function.__kwdefaults__
        counterpart.__dict__.update(function.__dict__)
        return counterpart


def _empty(value: Any) -> Any:
    """Return an empty container of the same kind, with its attributes."""
    if hasattr(value, "default_factory"):
        return type(value)(value.default_factory)
    cls: Any = type(value)
    empty = cls.__new__(cls)
    if hasattr(value, "__dict__"):
        empty.__dict__.update(value.__dict__)
    return empty
