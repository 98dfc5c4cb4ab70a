"""One process of a training run: `torchrun ... -m bnconvert.finetune MODEL --data DIR -o OUT`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import click

from bnconvert.cli.output import describe_os_error
from bnconvert.errors import BnconvertError
from bnconvert.finetune.launch import LAUNCHED
from bnconvert.finetune.options import settings_options
from bnconvert.finetune.settings import Settings

GRACE_SECONDS = 10.0
"""How long a process that lost its connection waits to be ended, so that the dead one is named."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings_options
def main(**options: Any) -> None:
    """Fine-tune MODEL; started once per process by torchrun, or alone."""
    try:
        settings = Settings(**options)
        _run(settings)
    except BnconvertError as error:
        _fail(str(error))
    except Exception as error:
        from bnconvert.finetune.processes import lost_connection

        if lost_connection(error):
            time.sleep(GRACE_SECONDS)
        rank = os.environ.get("RANK", "0")
        if isinstance(error, OSError):
            _fail(f"rank {rank}: {describe_os_error(error)}")
        click.echo(traceback.format_exc(), err=True)
        _fail(f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0])


def _run(settings: Settings) -> None:
    from bnconvert.finetune.console import Console
    from bnconvert.finetune.processes import joined
    from bnconvert.finetune.run import run

    with joined() as processes:
        console = Console(shown=processes.is_first, epochs=settings.epochs)
        with contextlib.redirect_stdout(sys.stderr):  # what models print is no result
            summary = run(settings, processes, console)
        if processes.is_first and LAUNCHED not in os.environ:
            click.echo(json.dumps(summary["final"]))


def _fail(message: str) -> NoReturn:
    """Tell the launcher, or the user, why this process ends."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    told = False
    if path:
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the disk may be full
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
            told = LAUNCHED in os.environ
    if not told:
        click.echo(f"error: {message}", err=True)
    sys.exit(1)


def _leave(code: int) -> NoReturn:
    """End without tearing down the interpreter.

    Threads of gloo that are still there then abort the process now and then, and everything that
    counts is written.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
