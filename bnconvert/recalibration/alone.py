"""Checks that calls which ran in step saw what they see alone.

`lockstep` stops a half-done call of somebody else's `forward` and lets another one run. A forward
that keeps something of its batch outside its local variables (skip connections on `self`, features
that a hook stores, the domain that a batch selects) then reads what another batch has left there.
Nothing raises; so some of the batches are called once more, one after the other, and what comes to
each layer is compared.
"""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from bnconvert.recalibration.moments import Moments


@dataclass(frozen=True)
class _Arrival:
    """What came to a layer.

    Attributes:
        layer: Name of the layer.
        moments: Moments of the values.
        scale: (C,) deviations of the values, which differences are measured in.
        tolerance: Largest difference that rounding explains.
    """

    layer: str
    moments: Moments
    scale: Tensor
    tolerance: float

    def equals(self, other: _Arrival) -> bool:
        """Return whether both are the same up to rounding, which may differ from call to call."""
        if (self.layer, self.moments.count) != (other.layer, other.moments.count):
            return False
        if not self.moments.count:
            return True
        mean = (self.moments.mean - other.moments.mean).abs() / self.scale
        deviation = ((other.scale - self.scale) / self.scale).abs()
        return bool((mean <= self.tolerance).all() and (deviation <= self.tolerance).all())


@dataclass
class Trace:
    """What came to the layers in one call, in order."""

    arrivals: list[_Arrival] = field(default_factory=list)

    def record(self, layer: str, eps: float, values: Tensor, moments: Moments) -> None:
        """Add what came to a layer."""
        variance = moments.variance if moments.count else moments.m2
        tolerance = torch.finfo(values.dtype).eps ** 0.5 if values.is_floating_point() else 0.0
        self.arrivals.append(_Arrival(layer, moments, (variance + eps).sqrt(), tolerance))

    def difference(self, other: Trace) -> str | None:
        """Return the name of the first layer that did not get the same in both; None if all did."""
        for mine, theirs in zip(self.arrivals, other.arrivals, strict=False):
            if not mine.equals(theirs):
                return mine.layer
        longer = max(self.arrivals, other.arrivals, key=len)
        shared = min(len(self.arrivals), len(other.arrivals))
        return longer[shared].layer if shared < len(longer) else None


_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)


def current() -> Trace | None:
    """Return the trace of the call that runs in this thread."""
    return _current.get()


@contextlib.contextmanager
def recording(trace: Trace | None) -> Iterator[None]:
    """Have `current` return the trace."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def draws_random_numbers(function: Callable[[], None]) -> bool:
    """Call a function; return whether it moved a random generator of torch, and put that back."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
        function()
        after = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
    return any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
