"""Where images come from: folders of images by class, and timm's named datasets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bnconvert.errors import BnconvertError
from bnconvert.image_files import is_image_name, read_image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
VALIDATION_NAMES = ("val", "validation", "valid", "test")


class Source(Protocol):
    """Labelled images by number."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label."""

    def __len__(self) -> int:
        """Return the number of images."""

    def load(self, index: int) -> tuple[Image, int]:
        """Return an image in RGB, and its label."""


@dataclass(frozen=True)
class FolderSource:
    """Image files with their labels.

    Attributes:
        samples: Path and label of each image.
        classes: Names of the classes, by label.
    """

    samples: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int) -> tuple[Image, int]:
        """Return an image in RGB, and its label.

        Raises:
            BnconvertError: The file cannot be read as an image.
        """
        path, label = self.samples[index]
        return read_image(path), label

    def without(self, paths: set[str]) -> FolderSource:
        """Return the source less some files."""
        kept = tuple(sample for sample in self.samples if sample[0] not in paths)
        return FolderSource(kept, self.classes)


@dataclass(frozen=True)
class TimmSource:
    """A dataset that timm opens by name."""

    dataset: Any
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int) -> tuple[Image, int]:
        """Return an image in RGB, and its label."""
        image, label = self.dataset[index]
        return image.convert("RGB"), int(label)


def open_sources(data: str, root: str | None, val_fraction: float) -> tuple[Source, Source]:
    """Return the training and the validation images.

    Args:
        data: A folder (`train` and `val` with one folder per class, or the class folders
            themselves, of which a part is held out), or the name of a timm dataset.
        root: Folder of a timm dataset.
        val_fraction: Part that is held out, of each class.

    Raises:
        BnconvertError: There is no such data, a class has no image, or the validation classes are
            not those of training.
    """
    folder = Path(data)
    if folder.is_dir():
        return _open_folder(folder, val_fraction)
    if "/" in data and not data.startswith((".", "/")) and not folder.parent.is_dir():
        return _open_timm(data, root, "train"), _open_timm(data, root, "validation")
    raise BnconvertError(
        f"{data}: there is no such folder; give a folder of images by class, or a timm dataset "
        "such as torch/cifar10"
    )


def _open_folder(folder: Path, val_fraction: float) -> tuple[FolderSource, FolderSource]:
    train = folder / "train"
    if not train.is_dir():
        return _hold_out(_read_classes(folder, None), val_fraction)
    source = _read_classes(train, None)
    for name in VALIDATION_NAMES:
        if (folder / name).is_dir():
            return source, _read_classes(folder / name, source.classes)
    return _hold_out(source, val_fraction)


def _read_classes(folder: Path, classes: tuple[str, ...] | None) -> FolderSource:
    """Read a folder with one folder per class, labelled and in the order as timm does it."""
    from timm.utils.misc import natural_key

    folders = (entry for entry in folder.iterdir() if entry.is_dir())
    present = sorted((f.name for f in folders if not _is_hidden(f.name)), key=natural_key)
    if not present:
        raise BnconvertError(f"{folder}: holds no folder of a class; give one folder per class")
    if classes is None and len(present) == 1:
        raise BnconvertError(
            f"{folder}: holds one class, {present[0]}; give two or more to tell apart"
        )
    if {name.lower() for name in present} <= _SPLITS:
        raise BnconvertError(
            f"{folder}: {', '.join(present)} look like parts of the data, not like classes; name "
            "them train and val"
        )
    unknown = [name for name in present if classes is not None and name not in classes]
    if unknown:
        raise BnconvertError(
            f"{folder}: class {unknown[0]} is not among the training classes; remove it or add "
            "training images"
        )
    names = classes or tuple(present)
    samples: list[tuple[str, int]] = []
    for label, name in enumerate(names):
        if name not in present:
            continue
        above = {os.path.realpath(parent) for parent in (folder, *folder.resolve().parents)}
        found = sorted(_image_paths(str(folder / name), above), key=natural_key)
        if not found:
            raise BnconvertError(
                f"{folder / name}: holds no image; add images or remove the folder"
            )
        samples += [(path, label) for path in found]
    return FolderSource(tuple(samples), names)


def _image_paths(folder: str, above: set[str]) -> Iterator[str]:
    """Yield the images in a folder and those below it, but follow no link to what is above."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from _image_paths(entry.path, above | {real})
            elif is_image_name(entry.name):
                yield entry.path


def _is_hidden(name: str) -> bool:
    """Whether a name is of what systems and tools leave among files."""
    return name.startswith(".") or name == "__MACOSX"


def _hold_out(source: FolderSource, fraction: float) -> tuple[FolderSource, FolderSource]:
    """Split evenly spaced images off each class, the same ones every time."""
    train: list[tuple[str, int]] = []
    held: list[tuple[str, int]] = []
    for label, name in enumerate(source.classes):
        own = [sample for sample in source.samples if sample[1] == label]
        if len(own) < 2:
            raise BnconvertError(
                f"{name}: has {len(own)} image, so none can be held out for validation; add "
                "images, or give train and val folders"
            )
        count = min(max(1, round(len(own) * fraction)), len(own) - 1)
        places = {(2 * place + 1) * len(own) // (2 * count) for place in range(count)}
        for place, sample in enumerate(own):
            (held if place in places else train).append(sample)
    return FolderSource(tuple(train), source.classes), FolderSource(tuple(held), source.classes)


def _open_timm(name: str, root: str | None, split: str) -> TimmSource:
    from timm.data import create_dataset

    try:
        dataset = create_dataset(name, root=root or "data", split=split, is_training=False)
        labels = getattr(dataset, "classes", None)
        count = len(labels) if labels else 1 + max(int(dataset[i][1]) for i in range(len(dataset)))
    except Exception as error:  # each of the libraries behind timm has errors of its own
        raise BnconvertError(
            f"{name}: timm cannot open it as a dataset ({error}); see --data-root"
        ) from error
    return TimmSource(dataset, tuple(labels or map(str, range(count))))
