"""`bnconvert finetune`: train on one or several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bnconvert.cli.output import UsageError, emit, json_option
from bnconvert.errors import BnconvertError
from bnconvert.finetune.options import settings_options


@click.command("finetune")
@settings_options
@click.option(
    "--nproc",
    type=click.IntRange(1),
    help="Processes on this machine. [default: one per GPU, or 1]",
)
@click.option(
    "--master-port", type=int, help="Port where the processes meet. [default: a free one]"
)
@json_option
def command(nproc: int | None, master_port: int | None, as_json: bool, **options: Any) -> None:
    """Fine-tune MODEL on images, with BatchNorm over all processes, and save it plain.

    For several machines, start the processes with
    torchrun ... -m bnconvert.finetune and the same options.
    """
    from bnconvert.finetune.launch import launch
    from bnconvert.finetune.settings import Settings

    try:
        settings = Settings(**options)
    except BnconvertError as error:
        raise UsageError(str(error)) from error
    launch(settings, nproc or _default_processes(), master_port)
    summary = json.loads((Path(settings.output) / "summary.json").read_text())
    emit(json.dumps(summary, indent=2) if as_json else _table(summary))


def _default_processes() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _table(summary: dict[str, Any]) -> str:
    """Return what was saved, with its scores."""
    from bnconvert.report import format_table

    rows: list[tuple[str, ...]] = [
        ("saved", summary["settings"]["output"], *_scores(summary["final"]))
    ]
    if "onnx" in summary:
        rows.append(("exported", summary["onnx"]["file"], *_scores(summary["onnx"])))
    return "\n".join([f"finetune: {len(summary['epochs'])} epochs", *format_table(rows)])


def _scores(scores: dict[str, Any]) -> tuple[str, str]:
    return f"loss {scores['loss']:.4f}", f"top-1 {scores['top1']:.2%} of {scores['images']}"
