"""Runs several calls of one function in step: each stops at every meeting point for the others.

The statistics of a layer over all batches are needed before any batch can go on behind that layer.
Running the batches one after the other would take one pass over the data per layer; here every
batch is a call of its own that waits at the layer, so that one pass is enough. The calls run in
threads because that is how Python keeps a half-done call; only one of them runs at any time, in
the order of the batches, so the result does not depend on timing.
"""

from __future__ import annotations

import contextvars
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Sequence


class _AbandonedError(BaseException):
    """Unwinds a waiting call after another one failed; no `Exception`, so nothing catches it."""


class _Call:
    """One call in a thread of its own, together with where it waits."""

    def __init__(self, function: Callable[[], None], context: _TorchContext) -> None:
        self.waits_at: Hashable | None = None
        self.done = False
        self.error: BaseException | None = None
        self._function = function
        self._context = context
        self._abandoned = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def advance(self) -> None:
        """Let the call run until it waits or has ended."""
        self.waits_at = None
        if self._thread is None:
            run = contextvars.copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        if self.done:
            self._thread.join()

    def wait(self, point: Hashable) -> None:
        """Wait at a point; called inside the thread."""
        if self._abandoned:
            raise _AbandonedError
        self.waits_at = point
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _AbandonedError

    def abandon(self) -> None:
        """Unwind the call, if it has begun and has not ended."""
        self._abandoned = True
        if self._thread is not None and not self.done:
            self.advance()

    def _run(self) -> None:
        _current.call = self
        try:
            with self._context.enter():
                self._function()
        except _AbandonedError:
            pass
        except BaseException as error:  # raised again by the thread that waits
            self.error = error
        self.done = True
        self._stopped.release()


class _TorchContext:
    """The settings that torch keeps per thread, as they are in the thread that makes this."""

    def __init__(self) -> None:
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]
        self._default_device = torch.get_default_device()
        self._cuda_device = torch.cuda.current_device() if _cuda_in_use() else None

    def enter(self) -> ExitStack:
        """Return an open context with the settings, and without gradients."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if self._default_device.type != "cpu":
            stack.enter_context(self._default_device)
        for device, dtype, cache in self._autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        if self._cuda_device is not None:
            stack.enter_context(torch.cuda.device(self._cuda_device))
        return stack


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Current(threading.local):
    call: _Call | None = None


_current = _Current()


def meet(point: Hashable) -> None:
    """Wait until the other calls have come to this point, or to another one, or have ended."""
    if _current.call is not None:
        _current.call.wait(point)


def in_step(functions: Sequence[Callable[[], None]]) -> Generator[Hashable]:
    """Run the functions and yield each point when all calls wait somewhere or have ended.

    What is to be done at a point is done by the consumer between two steps of the iteration. When
    the calls wait at different points (their control flow depends on the data), the point of the
    first call comes first. Closing the iterator unwinds all calls.

    Args:
        functions: Called without arguments; what they call may call `meet`.

    Yields:
        The point at which calls wait.

    Raises:
        BaseException: What one of the functions raised.
    """
    context = _TorchContext()
    calls = [_Call(function, context) for function in functions]
    ready = list(calls)
    try:
        while True:
            for call in ready:
                call.advance()
                if call.error is not None:
                    raise call.error
            waiting = [call for call in calls if not call.done]
            if not waiting:
                return
            point = waiting[0].waits_at
            yield point
            ready = [call for call in waiting if call.waits_at == point]
    finally:
        for call in calls:
            call.abandon()
