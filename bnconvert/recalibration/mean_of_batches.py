"""The estimator that averages the statistics of batches, each normalized by its own."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from bnconvert.forwarding import is_sharded
from bnconvert.recalibration.moments import Moments, merged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from bnconvert.recalibration.run import Run
    from bnconvert.recalibration.running_statistics import Statistics

_END = object()


def mean_of_batches(run: Run, batches: Iterable[Any]) -> None:
    """Estimate all layers at once, one batch in memory at a time."""
    groups = {s.name: s.group_ranks(run.ranks) for s in run.layers.values()}
    in_steps = is_sharded(run.network) or any(group is not None for group in groups.values())

    def observe(statistics: Statistics, values: Tensor) -> None:
        moments = Moments.of(values)
        group = groups[statistics.name]
        if group is not None:
            shared = run.ranks.share(moments)
            moments = merged(shared[rank] for rank in group)
        statistics.add_batch(moments)

    with run.observing(observe):
        iterator = iter(batches)
        for done in itertools.count():
            batch = next(iterator, _END)
            if in_steps and any(run.ranks.share(batch is _END)):
                break
            if batch is _END:
                break
            run.call(batch)
            run.progress(done + 1, 0)
    averages = run.ranks.share([s.averages for s in run.layers.values()])
    for statistics, own in zip(run.layers.values(), zip(*averages, strict=True), strict=True):
        statistics.settle_average(own)
