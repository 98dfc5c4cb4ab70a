"""Which pickles are refused, and what the refusal says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.pickle_values import walk_values
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bnconvert.checkpoint.pickle_vm import PickleMachine


def check(
    machine: PickleMachine, where: str, holds_module: Callable[[Any], bool], value: Any
) -> None:
    """Refuse the pickle if it called or mentioned what it may not.

    Args:
        machine: Has read the pickle.
        where: The file, for the message.
        holds_module: Whether a value is a pickled module.
        value: What `machine.run()` returned.

    Raises:
        CheckpointError: Lists all the names.
    """
    asked = ", ".join(machine.unlisted)
    if machine.called:
        listed = f" (names outside the fixed list that it asks for: {asked})" if asked else ""
        raise CheckpointError(
            f"{where}: refused: its pickle calls {', '.join(machine.called)}{listed}; nothing was "
            "run, save the state dict alone"
        )
    missing = [name for name in machine.unlisted if name not in machine.allow]
    if missing and not any(map(holds_module, walk_values(value))):
        flags = " ".join(f"--allow-global {name}" for name in missing)
        raise CheckpointError(
            f"{where}: refused: its pickle asks for {asked}; {flags} admits them as inert stand-ins"
        )
