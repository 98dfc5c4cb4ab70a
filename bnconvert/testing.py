"""Helpers for tests of code that uses bnconvert: ranks, tolerances, random BatchNorm values.

`run_ranks` starts real processes that talk over gloo on the loopback device, so a test of
distributed code runs anywhere. The function given to it must be importable (a plain function of a
module), as for every `multiprocessing` start method but fork.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerProcess


class Tolerance(NamedTuple):
    """Largest relative and absolute difference that rounding in a dtype explains."""

    rtol: float
    atol: float


TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
"""Tolerances on values of order one, per dtype of the compared tensor."""


def randomize_batchnorm(model: nn.Module, seed: int = 0) -> None:
    """Give every layer with running statistics random values that hide no mistake.

    Weights take both signs with some exact zeros, biases and means are not zero, variances lie
    between 0.3 and 2. The default values (1, 0, 0, 1) would make a wrong formula look right.

    Args:
        model: Changed in place; every module that has a `running_var` is filled.
        seed: Seed of the values; the global random state is left alone.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        values = torch.rand(like.shape, generator=generator, dtype=torch.float64)
        return low + (high - low) * values

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Module) and "running_var" in module._buffers:
                for name, low, high in (
                    ("weight", -1.5, 1.5),
                    ("bias", -1.0, 1.0),
                    ("running_mean", -1.0, 1.0),
                    ("running_var", 0.3, 2.0),
                ):
                    tensor = getattr(module, name, None)
                    if isinstance(tensor, torch.Tensor):
                        values = uniform(tensor, low, high)
                        if name == "weight":
                            values[::7] = 0.0
                        tensor.copy_(values)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` processes joined by a gloo process group.

    Args:
        fn: A function that can be imported; called with the rank first.
        world_size: Number of processes.
        *args: Further arguments; they are pickled.
        timeout: Seconds after which the processes that still run are ended.

    Returns:
        What each rank returned, by rank.

    Raises:
        AssertionError: A rank raised, died or did not finish; the text holds each traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bnconvert.testing", "bnconvert.convert"])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        receivers: list[Connection] = []
        processes: list[ForkServerProcess] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(sender, store, rank, world_size, fn, args), daemon=True
            )
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        results, failures = _collect(receivers, time.monotonic() + timeout)
        for process in processes:
            process.join(timeout=0.0 if failures else 5.0)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise AssertionError("\n".join(failures))
    return results


def _collect(receivers: list[Connection], deadline: float) -> tuple[list[Any], list[str]]:
    """Wait for one message per rank; after a first failure, the others get two more seconds."""
    results: list[Any] = [None] * len(receivers)
    failures: list[str] = []
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures += [f"rank {rank}: not finished in time" for rank in pending.values()]
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)  # noqa: S101 (for the type checker)
            rank = pending.pop(receiver)
            try:
                ok, payload = receiver.recv()
            except EOFError:
                ok, payload = False, "the process died"
            if ok:
                results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
            else:
                failures.append(f"rank {rank}: {payload}")
                deadline = min(deadline, time.monotonic() + 2.0)
    return results, failures


def _rank_main(
    sender: Connection,
    store: str,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()  # a rank that is done at once would close what others still connect to
        buffer = io.BytesIO()
        torch.save(fn(rank, *args), buffer)
        sender.send((True, buffer.getvalue()))
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, also when that one was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
