"""The `bnconvert` command: one lazily imported module per subcommand."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any, NoReturn

import click

from bnconvert import __version__
from bnconvert.cli.output import UsageError, describe_os_error
from bnconvert.errors import BnconvertError

COMMANDS = (
    "inspect",
    "convert",
    "revert",
    "checkpoint",
    "fold",
    "compare",
    "export",
    "fold-onnx",
    "finetune",
    "recalibrate",
    "doctor",
)


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class LazyGroup(click.Group):
    """Imports the module of a subcommand when it is named; `fold-onnx` lives in `fold_onnx.py`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the `command` object of the subcommand's module."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"bnconvert.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="bnconvert")
def group() -> None:
    """Convert, fine-tune, fold and export models that use BatchNorm.

    MODEL is a timm name (resnet50), a model folder, or package.module:callable.
    Exit codes: 0 done; 1 failed, nothing written; 2 usage; 3 layers left, with --strict.
    """


def main() -> NoReturn:
    """Run the command line; every refusal is one line on stderr, never a traceback."""
    if "" not in sys.path:  # package.module:callable may lie in the current folder
        sys.path.append("")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            group(prog_name="bnconvert")
    except UsageError as error:
        _exit(str(error), 2)
    except BnconvertError as error:
        _exit(str(error), 1)
    except OSError as error:
        _exit(describe_os_error(error), 1)
    sys.exit(0)


def _warn(message: Warning | str, *_where: Any, **_line: Any) -> None:
    click.echo(f"warning: {message}", err=True)


def _exit(message: str, code: int) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(code)
