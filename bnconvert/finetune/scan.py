"""Finding the images that cannot be read before training begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from bnconvert.errors import BnconvertError
from bnconvert.image_files import why_unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bnconvert.finetune.processes import Processes
    from bnconvert.finetune.sources import FolderSource

SHOWN = 5


def unreadable(source: FolderSource, processes: Processes) -> dict[str, str]:
    """Return the paths of the files that cannot be read, and why; each process tries a part."""
    paths = sorted(path for path, _ in source.samples)[processes.rank :: processes.size]
    with ThreadPoolExecutor(4) as pool:
        reasons = zip(paths, pool.map(why_unreadable, paths), strict=True)
        bad = [(path, why) for path, why in reasons if why]
    return dict(sorted(entry for part in processes.ranks.share(bad) for entry in part))


def refuse(bad: Mapping[str, str]) -> BnconvertError:
    """Return the error that names unreadable images."""
    paths = list(bad)
    more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return BnconvertError(
        f"{len(bad)} images cannot be read ({', '.join(paths[:SHOWN])}{more}; of the first: "
        f"{bad[paths[0]]}); remove them, or use --skip-bad-images"
    )
