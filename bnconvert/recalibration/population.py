"""The estimator that takes the pooled values of all batches, layer after layer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bnconvert.errors import BnconvertError, first_line
from bnconvert.recalibration import alone
from bnconvert.recalibration.lockstep import in_step, meet
from bnconvert.recalibration.moments import Moments, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from bnconvert.recalibration.run import Run
    from bnconvert.recalibration.running_statistics import Statistics

_PASSES_TO_REST = 50
"""Passes for layers that are fed by their own output, beyond one for each repeated layer."""

_CALLED_ALONE = 8
"""Batches that are called once more to see that going in step changed nothing."""

_KEEPS = (
    "its forward keeps something of a batch outside its local variables (on a module, or in a "
    "hook); use estimator='mean_of_batches', which calls it on one batch after the other"
)


def population(run: Run, batches: Iterable[Any]) -> None:
    """Estimate layer after layer, all batches in step.

    A layer that calls wait at more than once gets its statistics in parts, and what runs between
    the parts used the first of them. Then the pass is repeated with those layers held at the
    statistics of the pass before, until none of them moves: each pass makes the next of them
    exact. A layer that is fed by its own output need not come to rest.

    Raises:
        BnconvertError: In step, the model does not do what it does with one batch at a time, or
            the ranks reach different layers.
    """
    steps = _Steps(run, list(batches))
    held = frozenset(steps.walk(frozenset()))
    repeated = [statistics for name, statistics in steps.names.items() if name in held]
    passes = len(held) + _PASSES_TO_REST if held else 0
    for _ in range(passes):
        for statistics in repeated:
            statistics.settle_part()
        steps.walk(held)
        moving = [statistics for statistics in repeated if not statistics.rests()]
        if not moving:
            break
    steps.compare_with_calls_alone()


@dataclass
class _Steps:
    """The batches of a run, which go through the network in step."""

    run: Run
    batches: list[Any]
    traces: dict[int, alone.Trace] = field(default_factory=dict)
    failed: int | None = None

    def __post_init__(self) -> None:
        self.names = {statistics.name: statistics for statistics in self.run.layers.values()}
        last = len(self.batches) - 1
        self._checked = {place * last // (_CALLED_ALONE - 1) for place in range(_CALLED_ALONE)}

    def walk(self, held: frozenset[str]) -> list[str]:
        """Run all batches once; return the layers that were settled more than once."""
        for statistics in self.names.values():
            statistics.parts.clear()
        self.traces = {place: alone.Trace() for place in self._checked}
        settled: dict[str, int] = {}
        calls = [self._call(place, self.traces.get(place)) for place in range(len(self.batches))]
        try:
            with self.run.observing(_arrive), contextlib.closing(in_step(calls)) as steps:
                while (name := self._next(steps)) is not None:
                    self._settle(self.names[name], name in held)
                    settled[name] = settled.get(name, 0) + 1
                    self.run.progress(len(settled), len(self.names))
        except Exception as error:
            self._refuse_failure_in_step(error)
            raise
        return [name for name, times in settled.items() if times > 1]

    def compare_with_calls_alone(self) -> None:
        """Call some batches one after the other, with the final statistics."""
        with self.run.observing(_record):
            for place, in_step_trace in sorted(self.traces.items()):
                trace = alone.Trace()
                random = alone.draws_random_numbers(self._call(place, trace))
                layer = in_step_trace.difference(trace)
                if layer is not None and not random:
                    raise BnconvertError(
                        f"{layer or 'the model'}: gets other values when batch {place} goes in "
                        f"step with the others than when it goes alone, so {_KEEPS}"
                    )

    def _refuse_failure_in_step(self, error: Exception) -> None:
        """Raise if the batch whose call failed goes through the network alone."""
        if self.failed is None:
            return
        place, self.failed = self.failed, None
        try:
            alone.draws_random_numbers(self._call(place, None))
        except Exception:  # the failure in step is the one to report
            return
        cause = error.__cause__ or error
        raise BnconvertError(
            f"model: fails on batch {place} when it goes in step with the others "
            f"({type(cause).__name__}: {first_line(cause)}) but not when it goes alone, so {_KEEPS}"
        ) from error

    def _call(self, place: int, trace: alone.Trace | None) -> Callable[[], None]:
        def call() -> None:
            try:
                with alone.recording(trace):
                    self.run.call(self.batches[place])
            except Exception:
                self.failed = place
                raise

        return call

    def _next(self, steps: Iterator[Any]) -> str | None:
        """Return the layer at which the batches of all ranks wait; None at the end."""
        name: str | None = next(steps, None)
        everyone = self.run.ranks.share(name)
        if len(set(everyone)) > 1:
            where = ", ".join(f"rank {rank} {n or 'the end'}" for rank, n in enumerate(everyone))
            raise BnconvertError(
                f"recalibrate: the ranks do not reach the same layers in the same order ({where}); "
                "use estimator='mean_of_batches'"
            )
        return name

    def _settle(self, statistics: Statistics, is_held: bool) -> None:
        """Pool what has come to a layer on all ranks, and let the layer use it."""
        own = merged(statistics.fresh)
        statistics.fresh.clear()
        statistics.parts.append(merged(self.run.ranks.share(own)))
        if not is_held:
            statistics.settle_part()


def _arrive(statistics: Statistics, values: Tensor) -> None:
    """Take the values that reach a layer, and wait for those of the other batches."""
    statistics.fresh.append(_record(statistics, values))
    meet(statistics.name)


def _record(statistics: Statistics, values: Tensor) -> Moments:
    """Return the moments of what reaches a layer, after noting them for the call that runs."""
    moments = Moments.of(values)
    if (trace := alone.current()) is not None:
        trace.record(statistics.name, statistics.eps, values, moments)
    return moments
