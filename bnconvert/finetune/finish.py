"""The end of a run: plain BatchNorm again, a model folder, and scores of exactly what is in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bnconvert.convert import plan_revert_sync_batchnorm
from bnconvert.errors import BnconvertError
from bnconvert.finetune.evaluation import evaluate, evaluate_onnx
from bnconvert.finetune.network import build_model, fit_head, has_own_statistics
from bnconvert.freeze import plan_unfreeze_batchnorm
from bnconvert.models import CONFIG, WEIGHTS, load_model, load_weights, save_model
from bnconvert.recalibration.recalibrate import recalibrate_batchnorm
from bnconvert.report import Outcome

if TYPE_CHECKING:
    from torch import nn

    from bnconvert.finetune.training import Trainer


def finish(trainer: Trainer) -> dict[str, Any]:
    """Make the trained model plain, save it, and evaluate what was saved.

    Returns:
        The part of the summary about the result; on rank 0 alone with the ONNX file.
    """
    settings, processes = trainer.settings, trainer.processes
    model = trainer.result
    if has_own_statistics(model):
        processes.broadcast_state(model)
    result: dict[str, Any] = {"norm": _make_plain(model)}
    if settings.recalibrate is not None:
        result["recalibration"] = _recalibrate(trainer, model)
    if processes.is_first:
        _save(model, trainer.folder.path, trainer.data.classes)
    processes.wait()
    saved = _load(trainer).to(processes.device)
    result["final"] = evaluate(saved, trainer.data, processes, settings).to_dict()
    if settings.export is not None and processes.is_first:
        result["onnx"] = _export(trainer, saved)
    processes.wait()
    return result


def _save(model: nn.Module, folder: Path, classes: tuple[str, ...]) -> None:
    """Put the files of a model folder beside those of the run, each whole or not at all."""
    with TemporaryDirectory(dir=folder, prefix=".model-") as temporary:
        written = Path(temporary) / "model"
        save_model(model, written)
        config = json.loads((written / CONFIG).read_text())
        labelled = {**config, "label_names": list(classes)}
        (written / CONFIG).write_text(json.dumps(labelled, indent=2) + "\n")
        for name in (WEIGHTS, CONFIG):
            (written / name).replace(folder / name)


def _load(trainer: Trainer) -> nn.Module:
    """Return the model that the files of the folder make, built anew."""
    settings, folder = trainer.settings, trainer.folder.path
    if ":" not in settings.model:
        return load_model(folder)
    settings = replace(settings, checkpoint=None)
    model = build_model(settings)
    fit_head(model, settings, len(trainer.data.classes), trainer.data.size)
    load_weights(model, folder)
    return model


def _make_plain(model: nn.Module) -> dict[str, int]:
    """Unfreeze and revert; return how many layers became what."""
    thaw = plan_unfreeze_batchnorm(model)
    thaw.apply()
    revert = plan_revert_sync_batchnorm(model)
    revert.apply()
    return {
        "unfrozen": thaw.report.count(Outcome.UNFROZEN),
        "reverted": revert.report.count(Outcome.REVERTED),
    }


def _recalibrate(trainer: Trainer, model: nn.Module) -> list[dict[str, Any]]:
    settings, processes = trainer.settings, trainer.processes
    assert settings.recalibrate is not None  # noqa: S101 (asked by the caller)
    loader = trainer.data.recalibration_loader(
        processes, settings.batch_size, settings.recalibrate, settings.seed
    )
    try:
        report = recalibrate_batchnorm(model, loader, device=processes.device)
    except BnconvertError as error:
        raise BnconvertError(
            f"--recalibrate: {error} (the training is kept: --resume without --recalibrate saves "
            "the model with the statistics of training, and bnconvert recalibrate has --estimator)"
        ) from error
    batches = len(loader)
    if batches < settings.recalibrate:
        trainer.console.note(
            f"--recalibrate: is {settings.recalibrate} but each process has images for {batches} "
            "batches; all of them are used"
        )
    furthest = max(report.shifts, key=lambda shift: shift.mean, default=None)
    trainer.console.note(
        f"recalibrated {len(report.shifts)} layers on {batches} batches per process"
        + (f"; furthest {furthest.name}: {furthest}" if furthest else "")
    )
    shifts: list[dict[str, Any]] = report.to_dict()["shifts"]
    return shifts


def _export(trainer: Trainer, saved: nn.Module) -> dict[str, Any]:
    """Write the ONNX file, which export verifies, and evaluate it by itself."""
    from bnconvert.export import export_onnx

    settings = trainer.settings
    assert settings.export is not None  # noqa: S101 (asked by the caller)
    export_onnx(saved.cpu(), settings.export, overwrite=settings.force or settings.resume)
    scores = evaluate_onnx(settings.export, trainer.data, settings.batch_size)
    return {"file": settings.export, **scores.to_dict()}
