"""Images as tensors: transforms, data sets and loaders."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bnconvert.errors import BnconvertError, first_line
from bnconvert.finetune.batches import Key, Plan, mix
from bnconvert.finetune.scan import refuse, unreadable
from bnconvert.finetune.sources import FolderSource, Source, open_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from bnconvert.finetune.processes import Processes
    from bnconvert.finetune.settings import Settings


_RGB = 3


class Examples(Dataset[tuple["Tensor", int]]):
    """Transformed images; the random changes depend on the seed, the epoch and the image alone."""

    def __init__(self, source: Source, transform: Callable[[Any], Tensor], seed: int) -> None:
        self.source = source
        self._transform = transform
        self._seed = seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        epoch, index = key
        image, label = self.source.load(index)
        seed_everything(mix(self._seed, 1 + epoch, index))
        return self._transform(image), label


def seed_everything(seed: int) -> None:
    """Seed the generators that transforms and dropout draw from.

    `torch.manual_seed` records a stack trace for every device library that is not in use, which
    takes longer than loading a small image.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (timm draws from the global generator)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@dataclass(frozen=True)
class Data:
    """What a run trains and evaluates on.

    Attributes:
        train: Training images with random changes.
        still: Training images prepared like validation images, for recalibration.
        validation: Validation images.
        classes: Names of the classes, by label.
        skipped: Files that cannot be read and were left out.
        workers: Loading processes of this process.
        pin: Whether batches are put where a GPU copies them from.
        size: Channels, height and width of an image as the model gets it.
    """

    train: Examples
    still: Examples
    validation: Examples
    classes: tuple[str, ...]
    skipped: tuple[str, ...]
    workers: int
    pin: bool
    size: tuple[int, int, int]

    def loader(self, examples: Examples, batches: Iterable[Sequence[Key]]) -> DataLoader[Any]:
        """Return a loader of the batches, which name images by epoch and number."""
        return DataLoader(
            examples,
            batch_sampler=_Listed(list(batches)),
            num_workers=self.workers,
            pin_memory=self.pin,
            worker_init_fn=_leave_signals_to_the_parent,
            generator=torch.Generator().manual_seed(0),
        )

    def validation_loader(self, processes: Processes, batch_size: int) -> DataLoader[Any]:
        """Return this process's part of the validation images, every image in one process."""
        return self.loader(self.validation, _part(self.validation, processes, batch_size))

    def recalibration_loader(
        self, processes: Processes, batch_size: int, batches: int | None, seed: int
    ) -> DataLoader[Any]:
        """Return up to `batches` batches, or all, of this process's part of the training images."""
        size = len(self.still.source)
        plan = Plan(size, min(batch_size, size // processes.size), 1, 1, processes.rank,
                    processes.size, seed)  # fmt: skip
        parts = [micro.keys for update in plan.epoch(0) for micro in update]
        return self.loader(self.still, parts[:batches])


class _Listed(torch.utils.data.Sampler[Any]):
    """Yields the batches of a list."""

    def __init__(self, batches: list[Sequence[Key]]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _part(examples: Examples, processes: Processes, batch_size: int) -> list[list[Key]]:
    keys = [(0, index) for index in range(processes.rank, len(examples.source), processes.size)]
    return [keys[begin : begin + batch_size] for begin in range(0, len(keys), batch_size)]


def _leave_signals_to_the_parent(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def open_data(settings: Settings, model: nn.Module, processes: Processes) -> Data:
    """Open training and validation images, prepared as the model wants them.

    Raises:
        BnconvertError: There is no such data, or images cannot be read and are not to be skipped.
    """
    from timm.data import create_transform, resolve_data_config

    sources = open_sources(settings.data, settings.data_root, settings.val_fraction)
    train, validation, skipped = _without_bad(*sources, settings, processes)
    asked = {} if settings.img_size is None else {"img_size": settings.img_size}
    config = resolve_data_config(asked, model=model)
    augmented = {
        "no_aug": settings.no_aug,
        "scale": settings.scale,
        "hflip": settings.hflip,
        "color_jitter": settings.color_jitter,
        "auto_augment": settings.aa,
        "re_prob": settings.reprob,
    }
    still = create_transform(**config, is_training=False)
    channels = config["input_size"][0]
    if channels != _RGB:
        raise BnconvertError(
            f"{settings.model}: takes images of {channels} channels, and images are read in RGB; "
            "give a model with in_chans=3"
        )
    try:
        changing = (
            still if settings.no_aug else create_transform(**config, is_training=True, **augmented)
        )
    except (ValueError, AssertionError, KeyError, IndexError) as error:
        raise BnconvertError(
            f"--aa: {settings.aa!r} is no policy that timm makes ({first_line(error)}); give "
            "another, such as rand-m9-mstd0.5"
        ) from error
    return Data(
        Examples(train, changing, settings.seed),
        Examples(train, still, settings.seed),
        Examples(validation, still, settings.seed),
        train.classes,
        tuple(skipped),
        _workers(settings, processes),
        processes.device.type == "cuda",
        tuple(config["input_size"]),
    )


def _without_bad(
    train: Source, validation: Source, settings: Settings, processes: Processes
) -> tuple[Source, Source, list[str]]:
    """Leave out the files that cannot be read, or refuse them; named datasets are not scanned."""
    if not isinstance(train, FolderSource) or not isinstance(validation, FolderSource):
        return train, validation, []
    both = FolderSource(train.samples + validation.samples, train.classes)
    bad = unreadable(both, processes)
    if bad and not settings.skip_bad_images:
        raise refuse(bad)
    good = train.without(set(bad)), validation.without(set(bad))
    _refuse_nothing_left(*good)
    return *good, list(bad)


def _refuse_nothing_left(train: FolderSource, validation: FolderSource) -> None:
    labels = {label for _, label in train.samples}
    for label, name in enumerate(train.classes):
        if label not in labels:
            raise BnconvertError(
                f"{name}: none of its training images can be read; add images or remove the class"
            )
    if not validation.samples:
        raise BnconvertError("none of the validation images can be read; add images to validate on")


def _workers(settings: Settings, processes: Processes) -> int:
    if settings.workers is not None:
        return settings.workers
    free = (os.cpu_count() or 1) // processes.local_size - 1
    return max(0, min(8, free))
