"""The model of a run: built, given the right head, its BatchNorm prepared, wrapped for training."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bnconvert.convert import (
    describe_unknown,
    plan_convert_sync_batchnorm,
    plan_revert_sync_batchnorm,
)
from bnconvert.errors import BnconvertError, CheckpointError, UnknownLayerError, first_line
from bnconvert.finetune.data import seed_everything
from bnconvert.freeze import plan_freeze_batchnorm
from bnconvert.layers import Kind, kind_of
from bnconvert.models import load_model, load_weights, model_without_weights, recorded_facts
from bnconvert.probe import untouched
from bnconvert.report import LayerReport, Outcome, Report
from bnconvert.selection import named_like
from bnconvert.walk import find_norms

if TYPE_CHECKING:
    from bnconvert.finetune.processes import Processes
    from bnconvert.finetune.settings import Settings


_SEND_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # the second until torch 2.13
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


_PLAIN = "--norm plain leaves it as it is"


@dataclass(frozen=True)
class Head:
    """What became of the classifier.

    Attributes:
        outputs: Number of outputs.
        before: Number of outputs that the model came with.
        new: Whether the classifier was initialised anew.
    """

    outputs: int
    before: int
    new: bool

    def __str__(self) -> str:
        if self.new:
            return f"head initialised anew: {self.before} outputs became {self.outputs}"
        return f"head kept: {self.outputs} outputs"


def build_model(settings: Settings) -> nn.Module:
    """Return the model; it has its weights, unless `--checkpoint` gives them (`fit_head`)."""
    seed_everything(settings.seed)
    if settings.checkpoint is not None:
        return model_without_weights(settings.model)
    return load_model(settings.model)


def fit_head(
    model: nn.Module, settings: Settings, classes: int, size: tuple[int, int, int]
) -> Head:
    """Give the model as many outputs as are wanted, and the weights of `--checkpoint`.

    The checkpoint may have the head of the model, or one with the number of outputs wanted.

    Args:
        model: The model, with the head it came with.
        settings: Those of the run.
        classes: Number of classes of the data.
        size: Channels, height and width of an image.

    Raises:
        CheckpointError: The checkpoint fits the model with neither head.
        BnconvertError: `--num-classes` is too small for the data, or the head must change and the
            model does not say how.
    """
    wanted = settings.num_classes or classes
    if wanted < classes:
        raise BnconvertError(
            f"--num-classes: is {wanted} but the data has {classes} classes; give at least that"
        )
    if settings.checkpoint is not None:
        _load_checkpoint(model, settings, wanted, size)
    before = _number_of_outputs(model, size)
    if before == wanted:
        return Head(wanted, before, new=False)
    if not hasattr(model, "reset_classifier"):
        raise BnconvertError(
            f"{settings.model}: has {before} outputs but {wanted} are wanted, and the model has no "
            "reset_classifier to change that; give a model with the right number"
        )
    seed_everything(settings.seed)
    reset: Any = model.reset_classifier
    reset(wanted)
    return Head(wanted, before, new=True)


def check_forward(model: nn.Module, size: tuple[int, int, int]) -> int:
    """Run the model once in eval mode, and leave it as it is.

    Args:
        model: The model on the device of the run.
        size: Channels, height and width of an image.

    Returns:
        The number of scores it gives for an image.

    Raises:
        BnconvertError: The model does not run on such an image, or gives something other than a
            score per class.
    """
    parameter = next(model.parameters(), torch.empty(0))
    image = torch.zeros((1, *size), device=parameter.device, dtype=parameter.dtype)
    try:
        with untouched(model):
            output = model(image)
    except Exception as error:
        raise BnconvertError(
            f"model: does not run on an image of {'x'.join(map(str, size))} "
            f"({type(error).__name__}: {first_line(error)}); give another --img-size, or another "
            "model"
        ) from error
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        given = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise BnconvertError(
            f"model: gives {given} for an image, and training needs one tensor (1, classes); give "
            "a model that returns the scores alone"
        )
    return output.shape[1]


def _load_checkpoint(
    model: nn.Module, settings: Settings, wanted: int, size: tuple[int, int, int]
) -> None:
    path, known = Path(settings.checkpoint or ""), recorded_facts(settings.model)
    try:
        load_weights(model, path, known)
    except CheckpointError as error:
        reset: Any = getattr(model, "reset_classifier", None)
        if reset is None or _number_of_outputs(model, size) == wanted:
            raise
        reset(wanted)
        try:
            load_weights(model, path, known)
        except CheckpointError:
            raise error from None  # what was said of the head that the model came with


def _number_of_outputs(model: nn.Module, size: tuple[int, int, int]) -> int:
    """Return how many scores the model gives, which need not be what it says of itself."""
    without_head = getattr(model, "num_classes", None) == 0
    return 0 if without_head else check_forward(model, size)


def prepare_norms(model: nn.Module, settings: Settings) -> Report:
    """Freeze and synchronise the BatchNorm layers as the settings say.

    Raises:
        BnconvertError: A pattern of `--freeze` matches no layer, or a layer is unknown.
    """
    for pattern in settings.freeze:
        matched = plan_freeze_batchnorm(model, include=named_like(pattern)).report
        if not matched.count(Outcome.FROZEN):
            raise BnconvertError(
                f"--freeze: {pattern!r} matches no BatchNorm layer that can be frozen; see "
                "bnconvert inspect for their names"
            )
    reverted: tuple[LayerReport, ...] = ()
    if settings.norm != "sync":  # a folder may have been saved with synchronised layers
        back = plan_revert_sync_batchnorm(model, include=lambda _, m: kind_of(m) is Kind.SYNC)
        back.apply()
        reverted = tuple(e for e in back.report.layers if e.outcome is Outcome.REVERTED)
    include = None if settings.norm == "frozen" else settings.freeze
    plan = plan_freeze_batchnorm(model, include=include)
    plan.apply()
    if settings.norm == "frozen":
        return Report("prepare", plan.report.layers)
    frozen = tuple(layer for layer in plan.report.layers if layer.outcome is not Outcome.LEFT)
    if settings.norm == "plain":
        plain = [LayerReport(e.name, e.type, Outcome.LEFT, reason=_PLAIN) for e in plan.report.left]
        return Report("prepare", _joined(frozen, reverted, tuple(plain)))
    unknown = [norm for norm in find_norms(model) if norm.kind is Kind.UNKNOWN]
    if unknown:
        advice = "train with --norm plain or --norm frozen"
        raise UnknownLayerError(describe_unknown(unknown, advice))
    converted = plan_convert_sync_batchnorm(model)
    converted.apply()
    return Report("prepare", _joined(frozen, converted.report.layers))


def _joined(*parts: tuple[LayerReport, ...]) -> tuple[LayerReport, ...]:
    """Return the entries in order, of each layer the first."""
    entries: dict[str, LayerReport] = {}
    for entry in itertools.chain(*parts):
        entries.setdefault(entry.name, entry)
    return tuple(entries.values())


def has_own_statistics(model: nn.Module) -> bool:
    """Whether a layer takes its statistics over one process, so that processes differ."""
    return any(kind_of(m) in (Kind.PLAIN, Kind.UNKNOWN) for m in model.modules())


def least_images(model: nn.Module, processes: Processes) -> int:
    """Return how many images a process needs in a batch: two where it has to make a variance."""
    alone = processes.size == 1 and any(kind_of(m) is Kind.SYNC for m in model.modules())
    return 2 if alone or has_own_statistics(model) else 1


def wrap(model: nn.Module, processes: Processes) -> nn.Module:
    """Return the model as it is called in training: with several processes, wrapped in DDP.

    Buffers are sent from rank 0 in every step when layers take their statistics over one process;
    synchronised and frozen layers keep them equal by themselves.
    """
    if processes.size == 1:
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BnconvertError("model: has no parameter that requires a gradient; unfreeze some")
    options: dict[str, Any] = {_SEND_BUFFERS: has_own_statistics(model)}
    if processes.device.type == "cuda":
        options["device_ids"] = [processes.device]
    return DistributedDataParallel(model, **options)


def memory_format(settings: Settings) -> torch.memory_format:
    """Return the memory format of the model and its input."""
    return torch.channels_last if settings.channels_last else torch.contiguous_format
