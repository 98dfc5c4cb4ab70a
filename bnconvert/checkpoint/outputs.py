"""What every writer is given, and what it says while it works."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.copying import same_bytes
from bnconvert.checkpoint.names import listed
from bnconvert.errors import VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from bnconvert.checkpoint.record import Weights
    from bnconvert.checkpoint.source import SourceFile
    from bnconvert.checkpoint.tensors import LazyTensor

    Progress = Callable[[int], None]

NO_HASH = "0" * 64


@dataclass
class Job:
    """Weights to write and how.

    Attributes:
        weights: What is written.
        provenance: Where it comes from and what was changed.
        verify: Read the result back and compare every byte.
        sha256: Hash of the source, ready when the writer has streamed everything; None for none.
        progress: Called with the bytes of every tensor that was written.
    """

    weights: Weights
    provenance: dict[str, Any] = field(default_factory=dict)
    verify: bool = True
    sha256: SourceHash | None = None
    progress: Progress = lambda _: None

    def provenance_with(self, sha256: str) -> dict[str, Any]:
        """Return the provenance with the source's hash, or a placeholder of equal length."""
        return {**self.provenance, "sha256": sha256} if self.sha256 else self.provenance


class SourceHash:
    """The SHA-256 of source files, computed beside the copying.

    Args:
        files: In order; more than one are hashed one after the other.
    """

    def __init__(self, files: list[SourceFile]) -> None:
        self._digest = hashlib.sha256()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(files,), daemon=True)
        self._thread.start()

    def _run(self, files: list[SourceFile]) -> None:
        try:
            for file in files:
                for chunk in file.extent().chunks():
                    self._digest.update(chunk)
        except BaseException as error:
            self._error = error

    def result(self) -> str:
        """Wait and return the hash as hexadecimal text."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()


def without_aliases(
    tensors: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors that are stored, and the names that are the same memory as one of them."""
    stored: dict[str, LazyTensor] = {}
    shared: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = tensor.shares and (tensor.shares, tensor.dtype, tensor.shape, tensor.order)
        if key and key in first:
            shared[name] = first[key]
            continue
        if key:
            first[key] = name
        stored[name] = tensor
    return stored, shared


def compare_written(
    path: Path, wanted: Mapping[str, LazyTensor], written: Mapping[str, LazyTensor]
) -> None:
    """Compare what a file holds with what it should.

    Raises:
        VerificationError: A tensor is missing or has other bytes.
    """
    if set(wanted) != set(written):
        odd = set(wanted) ^ set(written)
        raise VerificationError(f"{path}: read back, it differs in the names {listed(odd)}")
    for name, tensor in wanted.items():
        if not same_bytes(tensor, written[name]):
            raise VerificationError(f"{path}: read back, {name} differs; the disk may be failing")
