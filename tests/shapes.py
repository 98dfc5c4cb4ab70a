"""Pictures of three shapes, as a folder of images by class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from pathlib import Path

CLASSES = ("circle", "square", "bar")


def write_shapes(folder: Path, train: int = 14, validation: int = 5) -> Path:
    """Write a training and a validation folder, with this many pictures per class."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("val", validation)):
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                draw_shape(name, generator).save(folder / part / name / f"{number}.png")
    return folder


def draw_shape(name: str, generator: torch.Generator) -> Image.Image:
    """Draw a bright shape at a random place, with noise.

    On flat pictures some channels are constant, and BatchNorm multiplies what rounding makes of
    them.
    """
    picture = Image.new("RGB", (32, 32), (20, 30, 40))
    pen = ImageDraw.Draw(picture)
    x, y, red = torch.randint(0, 14, (3,), generator=generator).tolist()
    box = (x, y, x + 16, y + 16) if name != "bar" else (x, y, x + 4, y + 16)
    (pen.ellipse if name == "circle" else pen.rectangle)(box, fill=(200 + red, 180, 90))
    values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).double()
    noisy = values + 25 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    data = bytes(noisy.clamp(0, 255).byte().tolist())
    return Image.frombytes("RGB", picture.size, data)
