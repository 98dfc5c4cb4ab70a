"""Changing what a module is without changing which object it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from bnconvert.plan import Undo


def become(module: nn.Module, other: nn.Module) -> Undo:
    """Turn a module into another one, keeping its identity and training flag.

    Every reference to the module, also from lists and closures, then sees the other one.

    Args:
        module: The module that changes class and state.
        other: Where class and state come from; not used otherwise afterwards.
    """
    cls, state = module.__class__, module.__dict__
    training = module.training
    module.__dict__ = dict(other.__dict__)
    module.__class__ = other.__class__
    module.train(training)

    def undo() -> None:
        module.__class__ = cls
        module.__dict__ = state

    return undo
