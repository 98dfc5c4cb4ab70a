"""The files that a run writes at its end where the user wants them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from bnconvert.errors import BnconvertError
from bnconvert.finetune.state import CHECKPOINT, METRICS, SUMMARY, UPDATES
from bnconvert.models import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from bnconvert.finetune.settings import Settings

_OF_THE_RUN = (CHECKPOINT, SUMMARY, UPDATES, METRICS, CONFIG, WEIGHTS)


def check_outputs(settings: Settings) -> None:
    """Refuse an `--export` or `--plot` that cannot be written at the end, before training begins.

    Either may lie in the folder of the run, which is yet to be made.

    Raises:
        BnconvertError: matplotlib is missing for a plot; or the file has no folder, exists without
            `--resume` or `--force`, or is another of those that the run writes.
    """
    if settings.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BnconvertError("--plot: needs matplotlib; install bnconvert[plot]")
    if settings.export is not None:
        _check_file("--export", Path(settings.export), settings)
    if settings.plot is not None:
        _check_file("--plot", Path(settings.plot), settings)
        if settings.export is not None and _real(settings.plot) == _real(settings.export):
            raise BnconvertError(f"--plot: {settings.plot} is also --export; name two files")


def _real(path: str | Path) -> Path:
    return Path(path).absolute().resolve()


def _check_file(option: str, path: Path, settings: Settings) -> None:
    if path.is_dir():
        raise BnconvertError(f"{option}: {path} is a folder; give the name of a file")
    in_the_run = _real(path.parent) == _real(settings.output)
    if in_the_run and path.name in _OF_THE_RUN:
        raise BnconvertError(f"{option}: {path} is a file of the run itself; give another name")
    if not in_the_run and not path.absolute().parent.is_dir():
        raise BnconvertError(
            f"{option}: there is no folder {path.absolute().parent}; make it first"
        )
    if path.exists() and not settings.force and not settings.resume:
        raise BnconvertError(f"{option}: {path} exists; use --force to replace it")
