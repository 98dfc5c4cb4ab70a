"""Finding the images that cannot be read before training begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from bnconvert.finetune.processes import Processes
    from bnconvert.finetune.sources import FolderSource

SHOWN = 5


def unreadable(source: FolderSource, processes: Processes) -> list[str]:
    """Return the paths of the files that cannot be decoded; each process tries a part of them.

    JPEG files are decoded at an eighth of their size, which finds damage as well.
    """
    paths = sorted(path for path, _ in source.samples)[processes.rank :: processes.size]
    with ThreadPoolExecutor(4) as pool:
        bad = [
            path for path, good in zip(paths, pool.map(_decodes, paths), strict=True) if not good
        ]
    return sorted(path for part in processes.ranks.share(bad) for path in part)


def _decodes(path: str) -> bool:
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.draft("RGB", (image.width // 8, image.height // 8))
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    return True


def refuse(bad: list[str]) -> BnconvertError:
    """Return the error that names unreadable images."""
    shown = ", ".join(bad[:SHOWN]) + (f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
    return BnconvertError(
        f"{len(bad)} images cannot be read ({shown}); remove them, or use --skip-bad-images"
    )
