"""A plan: what a pass would do to a model, and the only thing that does it.

Planning reads the model and changes nothing. `Plan.apply` runs the edits in order; when one fails,
the ones before it are undone, last first, so that a model is changed wholly or not at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from bnconvert.report import Report

Undo = Callable[[], None]
Edit = Callable[[], Undo]
"""An edit changes one thing and returns the function that takes it back."""

ModelT = TypeVar("ModelT", bound=nn.Module)


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold Python's cyclic garbage collector, which would walk a large model again and again.

    A plan makes some objects per layer and drops none of them, so there is nothing to collect; yet
    their number makes the collector visit every object of the process several times over.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Plan(Generic[ModelT]):
    """The report of a pass together with the edits that carry it out.

    Attributes:
        report: What `apply` will do, layer by layer.
    """

    def __init__(self, model: ModelT, report: Report, edits: Sequence[Edit] = ()) -> None:
        self.report = report
        self._model = model
        self._edits: tuple[Edit, ...] | None = tuple(edits)

    @without_collection()
    def apply(self) -> ModelT:
        """Change the model in place and return it.

        Raises:
            BnconvertError: The plan was applied before, or the model is no longer as planned; the
                model is then as it was.
        """
        if self._edits is None:
            raise BnconvertError(
                f"{self.report.pass_name}: this plan was applied already; make a new plan"
            )
        done: list[Undo] = []
        try:
            for edit in self._edits:
                done.append(edit())  # noqa: PERF401 (the list must hold what ran before a failure)
        except BaseException:
            for undo in reversed(done):
                undo()
            raise
        self._edits = None
        return self._model

    def __str__(self) -> str:
        return str(self.report)
