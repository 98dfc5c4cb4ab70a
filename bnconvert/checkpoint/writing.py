"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary path in the same folder; move it to `path` when the block ends well.

    The file is flushed to the disk before it is moved, and the folder after, so that a crash at
    any moment leaves the old file or the complete new one. Its mode is 0666 less the umask. If the
    block raises, the temporary file is removed and `path` is untouched.

    Args:
        path: The file to write.
        overwrite: Replace an existing file.

    Yields:
        Where to write.

    Raises:
        CheckpointError: `path` exists and may not be replaced, is a folder, or its folder is
            missing.
    """
    target = Path(path)
    check_target(target, overwrite)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        sync(temporary)
        if overwrite:
            temporary.replace(target)
        else:
            _move_without_replacing(temporary, target)
        sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse an output that exists without `overwrite`, is no file, or has no folder."""
    if target.is_dir():
        raise CheckpointError(f"{target}: is a folder; name a file")
    if target.exists() and not target.is_file():
        raise CheckpointError(
            f"{target}: is a device or pipe, which is never replaced; name a file"
        )
    if not overwrite and os.path.lexists(target):
        raise CheckpointError(f"{target}: exists; use --force (overwrite=True) to replace it")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent}: there is no such folder; make it first")


def _move_without_replacing(temporary: Path, target: Path) -> None:
    """Move a file to a name that must be free, also if another process takes it meanwhile."""
    try:
        os.link(temporary, target)
    except FileExistsError as error:
        raise CheckpointError(f"{target}: was created meanwhile; it is left as it is") from error
    except OSError:
        temporary.replace(target)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Return the umask; reading it is possible only by setting it, except through /proc."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new temporary folder beside `path`; rename it to `path` when the block ends well.

    Whatever is written into it is flushed to the disk before. If the block raises, the folder is
    removed.

    Args:
        path: The folder to make; it must not exist.

    Yields:
        Where to write.

    Raises:
        CheckpointError: `path` exists, or its parent is missing.
    """
    target = Path(path)
    check_folder(target)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    temporary.mkdir(mode=0o777)
    try:
        yield temporary
        for file in temporary.iterdir():
            file.chmod(0o666 & ~_umask())
            sync(file)
        sync(temporary)
        check_folder(target)
        temporary.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_folder(target: Path) -> None:
    """Refuse a folder to make that is there already, or has no parent."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists; a folder is only ever made new, name another")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent}: there is no such folder; make it first")
