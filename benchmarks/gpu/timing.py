"""Times of GPU work, without the host's: a queue that is full before the clock starts."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CACHE_BYTES = 256 << 20  # several times the second-level cache
_SLEEP_CYCLES = 4_000_000  # about 2 ms, in which the host queues the launches


def copies(bytes_each: int) -> int:
    """Return how many sets of tensors to rotate through, so that none is still in the cache."""
    return max(2, min(16, -(-CACHE_BYTES // bytes_each)))


def device_seconds(calls: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Return the median seconds of one call on the device.

    Args:
        calls: The same work on different tensors, run in turn.
        rounds: Measurements, after two that do not count.
    """
    times: list[float] = []
    for turn in range(rounds + 2):
        start, end = _event(), _event()
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wall_seconds(call: Callable[[], object], repeats: int = 50) -> float:
    """Return the mean seconds of a call in a loop, host and device together."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def copy_bandwidth() -> float:
    """Return the bytes per second of a device copy of 1 GiB, read and written ones together."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    seconds = device_seconds([lambda: target.copy_(source)] * 4)
    return 2 * source.numel() * 4 / seconds


def launches(call: Callable[[], object]) -> int:
    """Return how many kernels and memory operations a call puts on the device."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiler.events() or [])
