"""`torch.export` of a model, without what it prints, and where in the user's code it failed."""

from __future__ import annotations

import contextlib
import io
import logging
import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.export import ExportedProgram

    from bnconvert.arguments import Arguments

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    sysconfig.get_path("stdlib"),
)
"""Folders whose frames are not where a user's forward went wrong."""


def export_program(
    model: nn.Module, arguments: Arguments, dynamic_shapes: Any = None
) -> ExportedProgram:
    """Return the exported program of a model's forward.

    A graph that torch captured in part is printed by it to stderr, with a failure that says the
    same; both are kept from the terminal.

    Raises:
        Exception: As `torch.export.export` does; `place` says where.
    """
    quiet = (quiet_log("torch.fx.experimental.symbolic_shapes"), quiet_log("torch.export"))
    with contextlib.ExitStack() as stack:
        for context in (*quiet, torch.no_grad(), warnings.catch_warnings()):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return torch.export.export(
            model,
            arguments.args,
            arguments.kwargs,
            dynamic_shapes=dynamic_shapes,
            strict=False,
        )


def place(error: Exception) -> str:
    """Return " at file:line" of the innermost frame that is the user's code, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_LIBRARIES))]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


@contextlib.contextmanager
def quiet_log(name: str) -> Iterator[None]:
    """Silence a logger of a library whose failures are reported by an exception."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
