"""Where images come from: folders of images by class, and timm's named datasets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".jp2", ".avif"),
)
"""Names of files in class folders that count as images; upper case counts, too."""

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


def read_image(path: str) -> Image:
    """Return an image file in RGB.

    Raises:
        BnconvertError: The file cannot be read as an image.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            _refuse_floats(image)
            if image.mode.startswith("I"):  # 16 bits, of which convert() keeps the low ones
                return image.convert("I").point(lambda value: value * (1 / 256)).convert("RGB")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BnconvertError(
            f"{path}: cannot be read as an image ({error}); remove it, or use --skip-bad-images"
        ) from error


def _refuse_floats(image: Image) -> None:
    if image.mode == "F":  # convert() would cut off all but 0 to 255
        raise ValueError("it holds floating point numbers of unknown range")


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
    """Read a folder with one folder per class, labelled as timm does it."""
    from timm.data.readers.reader_image_folder import find_images_and_targets
    from timm.utils.misc import natural_key

    folders = (entry for entry in folder.iterdir() if entry.is_dir())
    present = sorted((f.name for f in folders if not _is_hidden(f, folder)), key=natural_key)
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
        found, _ = find_images_and_targets(
            str(folder / name), EXTENSIONS, class_to_idx=_EveryName(label), leaf_name_only=True
        )
        found = [(path, label) for path, label in found if not _is_hidden(Path(path), folder)]
        if not found:
            raise BnconvertError(
                f"{folder / name}: holds no image; add images or remove the folder"
            )
        samples += found
    return FolderSource(tuple(samples), names)


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether a path below a folder leads through what systems and tools leave among files."""
    parts = path.relative_to(folder).parts
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


class _EveryName(dict[str, int]):
    """Gives every folder below a class folder the label of the class."""

    def __init__(self, label: int) -> None:
        super().__init__()
        self._label = label

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> int:
        return self._label


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
