"""Reading image files: which count, which can be read without losing their values, and in RGB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.errors import BnconvertError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".jp2", ".avif"),
)
"""Names of files that count as images; upper case counts, too."""

_SIXTEEN_BITS = ("PNG", "PPM")
"""Formats whose images of mode "I" hold 16 bits and not 32."""


def is_image_name(name: str) -> bool:
    """Whether a file counts as an image."""
    return name.lower().endswith(EXTENSIONS)


def read_image(path: str) -> Image:
    """Return an image file in RGB; 16 bits are scaled to 8.

    Raises:
        BnconvertError: The file cannot be read as an image.
    """
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            _refuse_unknown_range(image)
            if image.mode.startswith("I"):  # 16 bits, of which convert() keeps the low ones
                return image.convert("I").point(lambda value: value * (1 / 256)).convert("RGB")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise BnconvertError(f"{path}: cannot be read as an image ({error}); remove it") from error


def why_unreadable(path: str) -> str:
    """Return why `read_image` would refuse a file, "" where it would not.

    JPEG files are decoded at an eighth of their size, which finds damage as well.
    """
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            _refuse_unknown_range(image)
            image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
            image.load()
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        return first_line(error)
    return ""


def _refuse_unknown_range(image: Image) -> None:
    """Raise where `convert` would cut off all but 0 to 255."""
    if image.mode == "F":
        raise ValueError("it holds floating point numbers of unknown range")
    if image.mode == "I" and image.format not in _SIXTEEN_BITS:
        raise ValueError("it holds 32-bit integers of unknown range")
