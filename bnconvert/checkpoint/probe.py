"""What the first look at a path shows: enough to recognise any format by its bytes."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bnconvert.checkpoint.archive import Archive
from bnconvert.checkpoint.source import SourceFile
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    import os

HEAD = 1024


@dataclass
class Probe:
    """A path and its first bytes.

    Attributes:
        path: As given.
        file: The file; None for a folder.
        head: Its first bytes.
        archive: Its zip directory, if it has one.
    """

    path: Path
    file: SourceFile | None = None
    head: bytes = b""
    archive: Archive | None = field(default=None, repr=False)

    @property
    def is_folder(self) -> bool:
        """Whether the path is a folder."""
        return self.file is None

    @property
    def source(self) -> SourceFile:
        """The file of a path that is one."""
        if self.file is None:
            raise CheckpointError(f"{self.path}: is a folder; name a file")
        return self.file

    def zip_has(self, suffix: str) -> bool:
        """Return whether the archive has a member whose name ends so."""
        return self.archive is not None and any(
            name == suffix or name.endswith("/" + suffix) for name in self.archive.names()
        )


def probe(path: str | os.PathLike[str]) -> Probe:
    """Look at a path.

    Raises:
        CheckpointError: There is nothing, or neither a file nor a folder, or an empty file.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{path}: {text}") from error
    if stat.S_ISDIR(mode):
        return Probe(path)
    file = SourceFile(path)
    if not file.size:
        raise CheckpointError(f"{path}: is empty; fetch it again")
    head = file.read(0, min(HEAD, file.size))
    archive = Archive(file.extent()) if head[:4] == b"PK\3\4" else None
    return Probe(path, file, head, archive)


def inside(folder: Path, name: str) -> Path:
    """Return a file named by an index, which must lie in the index's folder.

    A Hugging Face cache keeps its files as links into its own `blobs`; those are followed.

    Raises:
        CheckpointError: The name or a link leads out of the folder, or there is no such file.
    """
    path = folder / name
    try:
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder}: refers to {name!r}, which is not inside it; refused")
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        text = getattr(error, "strerror", None) or "its links go in a circle"
        raise CheckpointError(f"{path}: {text}; a part of the checkpoint is missing") from error
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{path}: is a link out of its folder; refused")
    return path
