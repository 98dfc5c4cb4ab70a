"""The edit that changes the class of a layer, with the attributes that come and go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert.errors import BnconvertError
from bnconvert.layers.own_forward import rebind_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from bnconvert.plan import Edit, Undo


def swap_class(
    module: nn.Module,
    name: str,
    target: type[nn.Module],
    *,
    add: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = {},  # noqa: B006 (never changed)
    drop: tuple[str, ...] = (),
) -> Edit:
    """Return the edit that makes a layer an instance of another class.

    Args:
        module: The layer; parameters, buffers, hooks and every other attribute stay.
        name: Its qualified name, for errors.
        target: The class it becomes.
        add: Attributes to set in the layer's `__dict__`, or a function that returns them when the
            plan is applied.
        drop: Attributes to remove from the layer's `__dict__`, where present.
    """
    planned = type(module)

    def edit() -> Undo:
        if type(module) is not planned:
            raise BnconvertError(
                f"{name or 'the model'}: is a {type(module).__name__} now but was a "
                f"{planned.__name__} when the plan was made; make a new plan"
            )
        attributes = add() if callable(add) else add
        before = dict(module.__dict__)
        rebind_forward(module, target)
        module.__class__ = target
        for key in drop:
            module.__dict__.pop(key, None)
        module.__dict__.update(attributes)

        def undo() -> None:
            module.__class__ = planned
            module.__dict__.clear()
            module.__dict__.update(before)

        return undo

    return edit
