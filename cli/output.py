"""What commands share: where text goes, exit codes, common options.

stdout carries the table or the JSON and nothing else; notes and progress go to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from typing import TYPE_CHECKING, Any, Protocol

import click

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bnconvert.report import Report

EXIT_LEFT = 3

_STDOUT = "bnconvert.stdout"
"""Where the context of a command keeps the stream for its result."""


class UsageError(BnconvertError):
    """The command line contradicts itself; exit code 2."""


class Printable(Protocol):
    """A result that prints as a table and as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""


def show(result: Printable, as_json: bool) -> None:
    """Print a result on stdout, as its table or as JSON."""
    emit(json.dumps(result.to_dict(), indent=2) if as_json else str(result))


def emit(text: str) -> None:
    """Print the result of a command on stdout."""
    click.echo(text, file=click.get_current_context().meta.get(_STDOUT))


def note(text: str) -> None:
    """Print a remark on stderr."""
    click.echo(text, err=True)


def exit_if_left(report: Report, strict: bool) -> None:
    """End with exit code 3 when `--strict` was given and layers were left."""
    if strict and report.left:
        note(f"--strict: {len(report.left)} layers were left")
        sys.exit(EXIT_LEFT)


def describe_os_error(error: OSError) -> str:
    """Return "path: what happened" for an error of the operating system."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def model_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the MODEL argument and `--checkpoint`."""
    command = click.option(
        "--checkpoint", metavar="FILE", help="Load these weights into the model."
    )(command)
    return click.argument("model")(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`, and send to stderr what models print while the command runs."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        click.get_current_context().meta[_STDOUT] = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            return command(*args, **kwargs)

    return click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")(run)


def output_options(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `-o/--output`, `--force` and `--dry-run`.

    Args:
        kind: What the output is, for the help text: "model folder", "ONNX file".
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--dry-run", is_flag=True, help="Show what would be done; write nothing."
        )(command)
        command = click.option("--force", is_flag=True, help="Replace an existing output.")(command)
        return click.option(
            "-o", "--output", metavar="PATH", required=True, help=f"The {kind} to write."
        )(command)

    return decorate


def input_size_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--input-size`."""
    return click.option(
        "--input-size",
        metavar="CxHxW",
        help="Size of the input images. [default: the model's own]",
    )(command)


def images_of_size(size: str | None, batch: int) -> Tensor | None:
    """Return random images of a size given as text, or None for the model's own size.

    Raises:
        UsageError: The text is no size.
    """
    if size is None:
        return None
    from bnconvert.arguments import random_images

    parts = size.lower().split("x")
    if len(parts) != 3 or not all(map(_is_size, parts)):
        raise UsageError(f"--input-size {size}: is not of the form CxHxW, such as 3x224x224")
    return random_images(tuple(map(int, parts)), batch)


_LARGEST_SIZE = 16384


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) <= _LARGEST_SIZE


def strict_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--strict`."""
    return click.option(
        "--strict", is_flag=True, help="Exit with 3 when a BatchNorm layer is left."
    )(command)


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--include` and `--exclude`, each of which may be repeated."""
    command = click.option(
        "--exclude", multiple=True, metavar="PATTERN", help="Leave layers whose name matches."
    )(command)
    return click.option(
        "--include", multiple=True, metavar="PATTERN", help="Change only layers that match."
    )(command)
