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

import inspect
import sys
import weakref
from typing import Any

from torch import nn

from bnconvert.errors import BnconvertError

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
        mixin: A class with a string `_bnconvert_prefix`, put before the name of the class, and
            `_bnconvert_public`, the names under which it is used; an origin keeps its own of those.
        origin: A layer class that does not override `forward`.

    Raises:
        BnconvertError: No class can be derived from it.
    """
    known = _COUNTERPARTS.setdefault(mixin, {})
    if origin not in known:
        rules: Any = mixin
        public = [name for name in rules._bnconvert_public if hasattr(origin, name)]
        body = {name: inspect.getattr_static(origin, name) for name in public}
        name = rules._bnconvert_prefix + origin.__name__
        try:
            cls = type(name, (mixin, origin), body | {"__module__": mixin.__module__})
        except TypeError as error:  # of its metaclass, or of an `__init_subclass__`
            raise BnconvertError(
                f"{origin.__qualname__}: cannot be subclassed ({error}); exclude layers of it"
            ) from error
        register(mixin, origin, cls)
    return known[origin]


class OriginSignature:
    """As the `__signature__` of a mixin: that of the origin, with the mixin's own arguments.

    `help` and editors show it, and `torch.nn.utils.skip_init` looks for "device" in it.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if owner not in _ORIGINS:
            raise AttributeError("__signature__")  # a subclass is read from its `__init__`
        _, origin = _ORIGINS[owner]
        given = inspect.signature(origin)
        parameters = dict(given.parameters)
        for parameter in inspect.signature(owner.__init__).parameters.values():  # type: ignore[misc]
            if parameter.kind is parameter.KEYWORD_ONLY:
                parameters.setdefault(parameter.name, parameter)
        return given.replace(parameters=sorted(parameters.values(), key=lambda p: p.kind))


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


def _generated_base(cls: type) -> type[nn.Module] | None:
    """Return the class that a generated class was put on top of, or None for any other class.

    A generated class is one of torch's own that cannot be imported, is named after its base with
    something in front, `ParametrizedBatchNorm2d`, and comes without a class statement. A user's
    class that happens to be named so is a subclass like any other.
    """
    bases = [base for base in cls.__bases__ if issubclass(base, nn.Module)]
    if cls in _ORIGINS or len(bases) != 1 or not cls.__module__.startswith("torch."):
        return None
    if cls.__name__ == bases[0].__name__ or not cls.__name__.endswith(bases[0].__name__):
        return None
    return None if cls.__qualname__ != cls.__name__ or _is_importable(cls) else bases[0]


def _is_importable(cls: type) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


def bottom(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class below all generated ones."""
    while (base := _generated_base(cls)) is not None:
        cls = base
    return cls


def rebase(
    cls: type[nn.Module], target: type[nn.Module], old: type[nn.Module] | None = None
) -> type[nn.Module]:
    """Return a class like `cls` with `target` at its bottom.

    Going back to the bottom from before returns the very class from before, unless something was
    added to or taken from the generated class meanwhile.

    Args:
        cls: The class of a layer, generated or not.
        target: What to put at the bottom.
        old: The class to replace, where it is not the bottom of `cls`.
    """
    base = None if cls is old else _generated_base(cls)
    if base is None:
        return target
    before: type[nn.Module] | None = vars(cls).get(_BEFORE)
    if before is not None and bottom(before) is target and _body(before) == _body(cls):
        return before
    known = _REBASED.setdefault(cls, weakref.WeakValueDictionary())
    if target not in known:
        bases = tuple(rebase(b, target, old) if b is base else b for b in cls.__bases__)
        below = next(b for b in bases if issubclass(b, nn.Module))
        body = _body(cls) | ({_BEFORE: cls} if target in _ORIGINS else {})
        name = cls.__name__.removesuffix(base.__name__) + below.__name__
        known[target] = type(name, bases, body)
    return known[target]


def _body(cls: type) -> dict[str, Any]:
    skipped = ("__dict__", "__weakref__", _BEFORE)
    return {key: value for key, value in vars(cls).items() if key not in skipped}
