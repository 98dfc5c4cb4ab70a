"""What a training run is asked to do."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bnconvert.errors import BnconvertError

Norm = Literal["sync", "plain", "frozen"]
NORMS = ("sync", "plain", "frozen")

FREE_TO_CHANGE = frozenset(
    {"output", "resume", "force", "workers", "export", "plot", "save_every", "recalibrate"}
)
"""Settings that may differ when a run is resumed: they do not change the training."""


@dataclass(frozen=True)
class Settings:
    """All options of a run; the names are those of the command line.

    Attributes:
        model: MODEL: a timm name, a model folder or `package.module:callable`.
        data: A folder of images by class, or the name of a timm dataset such as `torch/cifar10`.
        output: The folder of the run, and of the model at its end.
        checkpoint: A file of weights to start from.
        data_root: Where a timm dataset lies.
        val_fraction: Part of each class that is held out when there is no validation folder.
        norm: Synchronised, plain or frozen BatchNorm while training.
        freeze: fnmatch patterns of BatchNorm layers that are frozen.
        epochs: Number of passes over the data.
        batch_size: Images per process and step.
        accumulate: Steps whose gradients make one update.
        opt: Name of a timm optimizer.
        lr: Learning rate at its highest.
        momentum: Momentum of the optimizer.
        weight_decay: Weight decay of all but biases and norms.
        clip_grad: Largest norm of the gradient; None does not clip.
        sched: Name of a timm schedule.
        warmup_epochs: Epochs in which the learning rate rises.
        min_lr: Learning rate at the end of the schedule.
        smoothing: Label smoothing.
        no_aug: Resize and crop training images as validation images, with no random change.
        scale: Least and greatest area of the random crops, as parts of the image.
        hflip: Probability of a horizontal flip.
        color_jitter: Strength of colour jitter.
        aa: timm's AutoAugment policy.
        reprob: Probability of erasing a rectangle.
        img_size: Height and width of the images; None takes the model's own.
        num_classes: Number of outputs; None takes the number of classes of the data.
        ema: Keep an exponential moving average of the model, and save that.
        ema_decay: Decay of the average per update.
        amp: Autocast on the GPU.
        channels_last: Use the channels-last memory format.
        workers: Processes that load images, per process; None takes what the CPUs allow.
        seed: Seed of everything random.
        skip_bad_images: Leave out images that cannot be read, instead of stopping.
        recalibrate: Batches for recalibrating the statistics at the end; None does not.
        save_every: Updates between checkpoints within an epoch; None saves at the ends of epochs.
        export: ONNX file to write at the end.
        plot: SVG or PNG file for the curves.
        resume: Go on from the checkpoint in the output folder.
        force: Start anew in an output folder that holds a run.
    """

    model: str
    data: str
    output: str
    checkpoint: str | None = None
    data_root: str | None = None
    val_fraction: float = 0.2
    norm: Norm = "sync"
    freeze: tuple[str, ...] = ()
    epochs: int = 10
    batch_size: int = 32
    accumulate: int = 1
    opt: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 2e-5
    clip_grad: float | None = None
    sched: str = "cosine"
    warmup_epochs: int = 0
    min_lr: float = 0.0
    smoothing: float = 0.1
    no_aug: bool = False
    scale: tuple[float, float] = (0.08, 1.0)
    hflip: float = 0.5
    color_jitter: float = 0.4
    aa: str | None = None
    reprob: float = 0.0
    img_size: int | None = None
    num_classes: int | None = None
    ema: bool = False
    ema_decay: float = 0.9998
    amp: bool = False
    channels_last: bool = False
    workers: int | None = None
    seed: int = 0
    skip_bad_images: bool = False
    recalibrate: int | None = None
    save_every: int | None = None
    export: str | None = None
    plot: str | None = None
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate"):
            _at_least(name, getattr(self, name), 1)
        for name in ("img_size", "num_classes", "recalibrate", "save_every"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        self._check_ranges()
        if self.norm not in NORMS:
            raise BnconvertError(f"--norm: is {self.norm!r}; use one of {', '.join(NORMS)}")
        if not 0.0 < self.val_fraction < 1.0:
            raise BnconvertError(
                f"--val-fraction: is {self.val_fraction}; give a number between 0 and 1"
            )
        if self.resume and self.force:
            raise BnconvertError("--resume: cannot be combined with --force; give one")
        if self.plot is not None and Path(self.plot).suffix not in (".svg", ".png"):
            raise BnconvertError(f"--plot: {self.plot} is neither .svg nor .png; name such a file")

    def _check_ranges(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                option = name.replace("_", "-")
                raise BnconvertError(f"--{option}: is {value}; give {low:g} to {high:g}")
        if self.clip_grad is not None and not 0.0 < self.clip_grad < math.inf:
            raise BnconvertError(f"--clip-grad: is {self.clip_grad}; give a number above 0")
        if not 0.0 < self.scale[0] <= self.scale[1] <= 1.0:
            raise BnconvertError(
                f"--scale: is {self.scale[0]} {self.scale[1]}; give two shares of an image's area, "
                "such as 0.08 1"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain types; `from_dict` takes them back."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Return the settings that `to_dict` made plain."""
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**own)

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """Return how these settings differ from recorded ones where that changes the training."""
        own = self.to_dict()
        return [
            f"--{name.replace('_', '-')} was {recorded.get(name)!r} and is {value!r}"
            for name, value in own.items()
            if name not in FREE_TO_CHANGE and recorded.get(name) != value
        ]


_LARGEST = sys.float_info.max
_RANGES = (
    ("lr", 0.0, _LARGEST),
    ("min_lr", 0.0, _LARGEST),
    ("warmup_epochs", 0, sys.maxsize),
    ("momentum", 0.0, 1.0),
    ("weight_decay", 0.0, _LARGEST),
    ("smoothing", 0.0, 0.999),
    ("hflip", 0.0, 1.0),
    ("color_jitter", 0.0, _LARGEST),
    ("reprob", 0.0, 1.0),
    ("ema_decay", 0.0, 1.0),
    ("workers", 0, sys.maxsize),
    ("seed", 0, 2**32 - 1),
)
"""Options that are numbers, with the least and the largest value."""


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BnconvertError(f"--{name.replace('_', '-')}: is {value}; give at least {least}")
