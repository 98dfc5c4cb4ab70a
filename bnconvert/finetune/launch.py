"""Starting the processes of a run on one machine, with torchrun's agent."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from bnconvert.errors import BnconvertError
from bnconvert.finetune.options import to_arguments

if TYPE_CHECKING:
    from bnconvert.finetune.settings import Settings

LAUNCHED = "BNCONVERT_LAUNCHED"
"""Set in the environment of processes whose errors the launcher reports."""

SHUTDOWN_SECONDS = 20
"""How long processes may take to end after another one failed, before they are killed."""


def launch(settings: Settings, processes: int, port: int | None = None) -> None:
    """Train with several processes on this machine, and wait for the end.

    Args:
        settings: What to do.
        processes: Number of processes.
        port: Where the processes meet; None takes a free one.

    Raises:
        BnconvertError: A process failed or died; the text names it. The others were ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import launch_agent

    if port is not None:
        _check_port(port)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    arguments = ["-u", "-m", "bnconvert.finetune", *to_arguments(settings)]
    try:
        launch_agent(_config(processes, port), sys.executable, arguments)
    except ChildFailedError as error:
        raise BnconvertError(_describe(error.failures)) from error
    except SignalException as error:
        raise BnconvertError(
            f"stopped by {error.sigval.name}; the state was saved if training had begun, go on "
            "with --resume"
        ) from error
    finally:
        del os.environ[LAUNCHED]


def _config(processes: int, port: int | None) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="bnconvert",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port or 0}",
        rdzv_configs={"timeout": 60},
        max_restarts=0,
        monitor_interval=0.2,
        local_addr="127.0.0.1",
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise BnconvertError(
                f"--master-port: {port} cannot be used ({error}); give another or leave it out"
            ) from error


def _describe(failures: dict[int, Any]) -> str:
    """Return which rank failed first, and how: one that died before those that noticed it."""
    died = {
        rank: failure
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.signal_name() not in ("SIGTERM", "SIGINT")
    }
    if died:
        rank, failure = min(died.items())
        return (
            f"rank {rank} was ended by {failure.signal_name()}; the others were stopped, go on "
            "with --resume"
        )
    rank, failure = min(failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    text = failure.message
    if isinstance(text, dict):  # written by the process itself
        return str(text["message"])
    return f"rank {rank} ended with exit code {failure.exitcode}"
