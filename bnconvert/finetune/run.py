"""One training run, as each of its processes carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert import __version__
from bnconvert.finetune.batches import Plan
from bnconvert.finetune.curves import draw
from bnconvert.finetune.data import Data, open_data
from bnconvert.finetune.finish import finish
from bnconvert.finetune.network import (
    Head,
    build_model,
    check_forward,
    fit_head,
    least_images,
    memory_format,
    prepare_norms,
    wrap,
)
from bnconvert.finetune.outputs import check_outputs
from bnconvert.finetune.state import SCHEMA, RunFolder
from bnconvert.finetune.training import Trainer
from bnconvert.models import model_folder
from bnconvert.ranks import verify_ranks

if TYPE_CHECKING:
    from torch import nn

    from bnconvert.finetune.console import Console
    from bnconvert.finetune.processes import Processes
    from bnconvert.finetune.settings import Settings
    from bnconvert.report import Report


def run(settings: Settings, processes: Processes, console: Console) -> dict[str, Any]:
    """Train, and write the model folder; all processes of the run call this.

    Args:
        settings: What to do.
        processes: This process among the others.
        console: Where progress is shown.

    Returns:
        The summary, which rank 0 has written to `summary.json`.

    Raises:
        BnconvertError: The settings do not fit the machine, the model or the data; or training
            failed or was stopped, and its state is saved.
    """
    folder = RunFolder(settings.output)
    if processes.is_first:
        folder.check(settings)
        check_outputs(settings)
    processes.wait()
    model = build_model(settings)
    data = open_data(settings, model, processes)
    head = fit_head(model, settings, len(data.classes), data.size)
    _record_size(model, settings)
    report = prepare_norms(model, settings)
    _announce(console, settings, processes, data, head, report)
    trainer = _trainer(settings, processes, console, folder, model, data)
    check_forward(trainer.model, data.size)
    state = folder.load(settings, trainer.facts) if settings.resume else None
    if state is not None:
        trainer.restore(state)
        done = trainer.progress
        console.note(f"resumed in epoch {done.epoch + 1} after update {done.update}")
    elif processes.is_first:
        if settings.resume:
            console.note(f"{settings.output}: holds no saved state to resume; starts anew")
        folder.begin()
    trainer.train()
    summary = {
        **_facts_of_run(settings, processes, data, head, report),
        "epochs": trainer.progress.epochs,
        **finish(trainer),
    }
    if processes.is_first:
        if settings.plot is not None:
            draw(settings.plot, trainer.progress.epochs)
        folder.write_summary(summary)
    processes.wait()
    return summary


def _trainer(
    settings: Settings,
    processes: Processes,
    console: Console,
    folder: RunFolder,
    model: nn.Module,
    data: Data,
) -> Trainer:
    """Place the model, check that all processes hold the same, and wrap it."""
    model.to(processes.device).to(memory_format=memory_format(settings))
    model.train()
    verify_ranks(model)
    plan = Plan(
        len(data.train.source),
        settings.batch_size,
        settings.accumulate,
        least_images(model, processes),
        processes.rank,
        processes.size,
        settings.seed,
    )
    if plan.left_out:
        console.note(
            f"the last {plan.left_out} images of each shuffled epoch are left out: fewer than "
            f"{plan.least} per process"
        )
    facts = {
        "processes": processes.size,
        "training images": len(data.train.source),
        "validation images": len(data.validation.source),
        "classes": list(data.classes),
    }
    wrapped = wrap(model, processes)
    return Trainer(settings, model, wrapped, data, plan, processes, folder, console, facts)


def _record_size(model: nn.Module, settings: Settings) -> None:
    """Record in the model's timm configuration the image size that it is trained for."""
    config = getattr(model, "pretrained_cfg", None)
    if settings.img_size is not None and isinstance(config, dict):
        channels = next(iter(config.get("input_size", (3,))))
        size = (channels, settings.img_size, settings.img_size)
        model.pretrained_cfg = {**config, "input_size": size}  # type: ignore[assignment]


def _announce(
    console: Console,
    settings: Settings,
    processes: Processes,
    data: Data,
    head: Head,
    report: Report,
) -> None:
    console.note(
        f"{settings.model}: {len(data.train.source)} training and "
        f"{len(data.validation.source)} validation images of {len(data.classes)} classes, "
        f"{processes.size} processes x batch {settings.batch_size}"
    )
    if data.skipped:
        console.note(f"{len(data.skipped)} images cannot be read and are left out:")
        for path in data.skipped:
            console.note(f"  {path}")
    from_timm = ":" not in settings.model and model_folder(settings.model) is None
    if from_timm and settings.checkpoint is None:
        console.note(f"{settings.model}: starts from random weights; --checkpoint gives others")
    console.note(str(head))
    console.note(str(report))


def _facts_of_run(
    settings: Settings, processes: Processes, data: Data, head: Head, report: Report
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "bnconvert": __version__,
        "settings": settings.to_dict(),
        "processes": processes.size,
        "device": processes.device.type,
        "training_images": len(data.train.source),
        "validation_images": len(data.validation.source),
        "classes": list(data.classes),
        "skipped_images": list(data.skipped),
        "head": str(head),
        "prepared": report.to_dict(),
    }
