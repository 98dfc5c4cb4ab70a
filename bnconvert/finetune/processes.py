"""The processes of a run: which one this is, its device, and what all of them agree on."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bnconvert.collective import Ranks
from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from torch import Tensor, nn


@dataclass
class Processes:
    """This process among those of the run.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        local_size: Number of processes on this machine.
        device: Where this process computes.
        ranks: Exchange of small values.
        control: The process group for flags on the CPU.
        stop: Whether this process was asked to stop.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    ranks: Ranks
    control: Any = None
    stop: bool = False

    @classmethod
    def alone(cls) -> Processes:
        """Return this process on the CPU, without others, also while there are others."""
        return cls(0, 1, 1, torch.device("cpu"), Ranks.alone())

    @classmethod
    def present(cls, device: torch.device, local_size: int) -> Processes:
        """Return this process among those of the default process group, if there is one."""
        ranks = Ranks()
        control = None
        if ranks.size > 1:
            control = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
        return cls(ranks.rank, ranks.size, local_size, device, ranks, control)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and shows progress."""
        return self.rank == 0

    def any_stops(self) -> bool:
        """Whether a process was asked to stop; all processes get the same answer."""
        if self.size == 1:
            return self.stop
        flag = torch.tensor(int(self.stop))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flag)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums of the processes' tensors, on the CPU."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values.cpu()

    def broadcast_state(self, model: nn.Module) -> None:
        """Give every process the buffers that rank 0 has."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def wait(self) -> None:
        """Wait for all processes."""
        self.ranks.share(None)


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the process group that torchrun's environment describes, if there is one.

    Within the block, SIGINT, SIGTERM and the end of torchrun ask for a stop after the current
    update.
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(int(os.environ.get("LOCAL_RANK", "0")), local_size)
    on_gpu = device.type == "cuda"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    processes = Processes.present(device, local_size)
    try:
        with _signals_ask_to_stop(processes):
            yield processes
    finally:
        if processes.size > 1:
            dist.destroy_process_group()


def lost_connection(error: Exception) -> bool:
    """Whether another process is gone: what gloo and NCCL raise then differs by version."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("connection", "socket", "peer", "gloo", "nccl"))
    )


def _device(local_rank: int, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_size > torch.cuda.device_count():
        raise BnconvertError(
            f"--nproc: is {local_size} but there are {torch.cuda.device_count()} GPUs; start one "
            "process per GPU, or hide the GPUs to train on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def _signals_ask_to_stop(processes: Processes) -> Iterator[None]:
    def ask(number: int, frame: FrameType | None) -> None:
        processes.stop = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    done = threading.Event()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch_launcher, args=(processes, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch_launcher(processes: Processes, done: threading.Event) -> None:
    """Ask for a stop when torchrun was killed, which leaves its processes running."""
    launcher = os.getppid()
    while not done.wait(1.0):
        if os.getppid() != launcher:
            processes.stop = True
            return
