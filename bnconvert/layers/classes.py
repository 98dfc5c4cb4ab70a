"""Deriving layer classes, and replacing the class at the bottom of a generated one.

A layer is converted by changing its `__class__`, so that everything else about it stays as it is.
Three kinds of class occur:

- stock classes (`nn.BatchNorm2d`) have a named counterpart (`SyncBatchNorm2d`);
- subclasses get a counterpart that is derived on first use, mixin first;
- generated classes (`torch.nn.utils.parametrize`, FSDP2's `fully_shard`) were put on top of one
  layer or of many at run time and can be taken off again by looking at their bases. They keep
  their place: `rebase` rebuilds them on top of the counterpart of the class below.
"""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

from torch import nn

_COUNTERPARTS: dict[type, dict[type, type[nn.Module]]] = {}
"""mixin -> class -> the class that has the mixin in front of it."""

_ORIGINS: dict[type, tuple[type, type[nn.Module]]] = {}
"""The derived class -> its mixin and the class it was derived from."""

_REBASED: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[type, type]] = (
    weakref.WeakKeyDictionary()
)

_BEFORE = "_bnconvert_before"


def register(mixin: type, origin: type[nn.Module], cls: type[nn.Module]) -> None:
    """Record a named class as the counterpart that `derive(mixin, origin)` returns."""
    _COUNTERPARTS.setdefault(mixin, {})[origin] = cls
    _ORIGINS[cls] = (mixin, origin)


def derive(mixin: type, origin: type[nn.Module]) -> type[nn.Module]:
    """Return the class that puts the mixin in front of a layer class, the same one every time.

    Args:
        mixin: A class with a string `prefix`, put before the name of the class.
        origin: A layer class that does not override `forward`.
    """
    known = _COUNTERPARTS.setdefault(mixin, {})
    if origin not in known:
        name = f"{mixin.prefix}{origin.__name__}"  # type: ignore[attr-defined]
        register(mixin, origin, type(name, (mixin, origin), {"__module__": mixin.__module__}))
    return known[origin]


def origin_of(cls: type) -> tuple[type, type[nn.Module]] | None:
    """Return the mixin and the layer class that a class was derived from, if it was derived."""
    return _ORIGINS.get(cls)


def reduce_derived(module: nn.Module, reduced: Any) -> Any:
    """Return what pickles a layer, given what its base class returns for it.

    A derived class without a name in its module cannot be imported: what it is derived from is
    pickled instead.
    """
    cls = type(module)
    derived = origin_of(cls)
    if derived is None or vars(sys.modules[cls.__module__]).get(cls.__name__):
        return reduced
    return (_new_derived, derived, *reduced[2:])


def _new_derived(mixin: type, origin: type[nn.Module]) -> nn.Module:
    cls = derive(mixin, origin)
    return cls.__new__(cls)


def is_generated(cls: type) -> bool:
    """Whether a class was put on top of a layer's class at run time and cannot be imported.

    Classes made inside a function are told by their qualified name; classes that were redefined
    (as in a notebook) and call `super()` cannot be rebuilt on another base and do not count.
    """
    if cls in _ORIGINS or "<locals>" in cls.__qualname__ or "__init__" in vars(cls):
        return False
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not cls and _module_base(cls) is not None and not _uses_super(cls)


def _uses_super(cls: type) -> bool:
    functions = (value for value in vars(cls).values() if isinstance(value, types.FunctionType))
    return any("__class__" in function.__code__.co_freevars for function in functions)


def _module_base(cls: type) -> type[nn.Module] | None:
    bases = [base for base in cls.__bases__ if issubclass(base, nn.Module)]
    return bases[0] if len(bases) == 1 else None


def bottom(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class below all generated ones."""
    while is_generated(cls):
        base = _module_base(cls)
        assert base is not None  # noqa: S101 (is_generated says so)
        cls = base
    return cls


def rebase(cls: type[nn.Module], target: type[nn.Module]) -> type[nn.Module]:
    """Return a class like `cls` whose bottom is `target`.

    Going back to the bottom from before returns the very class from before, unless something was
    added to or taken from the generated class meanwhile.
    """
    old = bottom(cls)
    if cls is old:
        return target
    before: type[nn.Module] | None = vars(cls).get(_BEFORE)
    if before is not None and bottom(before) is target and _body(before) == _body(cls):
        return before
    known = _REBASED.setdefault(cls, weakref.WeakValueDictionary())
    if target not in known:
        known[target] = _rebuild(cls, old, target)
    return known[target]


def _rebuild(cls: type[nn.Module], old: type, target: type[nn.Module]) -> type[nn.Module]:
    base = _module_base(cls)
    assert base is not None  # noqa: S101 (cls is generated)
    bases = tuple(rebase(b, target) if b is base else b for b in cls.__bases__)
    body = _body(cls)
    if target in _ORIGINS:
        body[_BEFORE] = cls
    name = cls.__name__.removesuffix(old.__name__)
    return type(name + target.__name__ if name != cls.__name__ else name, bases, body)


def _body(cls: type) -> dict[str, Any]:
    skipped = ("__dict__", "__weakref__", _BEFORE)
    return {key: value for key, value in vars(cls).items() if key not in skipped}
