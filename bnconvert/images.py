"""Load photos as a timm model wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def image_paths(folder: Path) -> list[Path]:
    """Return the images of a folder, without its subfolders, in the order of their names.

    Raises:
        BnconvertError: There is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise BnconvertError(f"{folder}: there is no such folder; pass a folder of images")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise BnconvertError(f"{folder}: holds no image; pass a folder of PNG or JPEG files")
    return paths


def load_images(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    """Return all images of a folder as one batch, (images, channels, height, width).

    Args:
        folder: See `image_paths`.
        config: timm's data configuration, see `bnconvert.arguments.data_config`.

    Raises:
        BnconvertError: There is no image, or one cannot be read.
    """
    from timm.data import create_transform

    transform = create_transform(**config, is_training=False)
    return torch.stack([_load(path, transform) for path in image_paths(folder)])


def _load(path: Path, transform: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return transform(image.convert("RGB"))
    except OSError as error:  # also what PIL raises for a file that is no image
        raise BnconvertError(f"{path}: cannot be read as an image; remove it") from error
