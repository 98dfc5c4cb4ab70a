"""Load photos as a timm model wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bnconvert.errors import BnconvertError
from bnconvert.image_files import is_image_name, read_image

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def image_paths(folder: Path) -> list[Path]:
    """Return the images of a folder, without its subfolders, in the order of their names.

    Raises:
        BnconvertError: There is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise BnconvertError(f"{folder}: there is no such folder; pass a folder of images")
    paths = sorted(path for path in folder.iterdir() if _counts(path.name))
    if not paths:
        raise BnconvertError(f"{folder}: holds no image; pass a folder of PNG or JPEG files")
    return paths


def _counts(name: str) -> bool:
    return is_image_name(name) and not name.startswith(".")


def load_images(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    """Return all images of a folder, resized and cropped for a timm model but not normalised.

    Args:
        folder: See `image_paths`.
        config: timm's data configuration, see `bnconvert.arguments.data_config`.

    Returns:
        uint8, (images, height, width, 3).

    Raises:
        BnconvertError: There is no image, or one cannot be read.
    """
    from timm.data import create_transform

    shape = {**config, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    transform = create_transform(**shape, is_training=False)
    images = torch.stack([transform(read_image(str(path))) for path in image_paths(folder)])
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def normalize(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Turn decoded images into what a model takes.

    The operations and their order are those of torchvision's `ToTensor` and `Normalize`, so the
    values are equal to the last bit: divide by 255, subtract the mean, divide by the deviation.

    Args:
        images: uint8, (batch, height, width, channels).
        mean: One value per channel, for pixels between 0 and 1.
        std: Likewise.

    Returns:
        float32, (batch, channels, height, width).
    """
    center = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
    deviation = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)
    return (images.permute(0, 3, 1, 2).to(torch.float32) / 255 - center) / deviation
