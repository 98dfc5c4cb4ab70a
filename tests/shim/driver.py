"""Runs the CUDA kernel sources on CPU tensors: `shim.hpp` and g++ in the place of a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.kernels import geometry
from bnconvert.kernels.variants import (
    FOLDER,
    KERNELS,
    SOURCES,
    Variant,
    all_variants,
    translation_unit,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")

FLAGS = ("-std=c++17", "-shared", "-fPIC", "-O0", "-ffp-contract=off", "-fno-strict-aliasing")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare")


def build(
    variants: tuple[Variant, ...], flags: tuple[str, ...] = (), sources: Path = FOLDER
) -> Path:
    """Compile variants into a shared library, once per content; return its path."""
    text = translation_unit(variants, hardware="shim.hpp")
    text += "".join(f"SHIM_EXPORT({v.name}, {v.arguments})\n" for v in variants)
    files = [HERE / "shim.hpp", *(sources / name for name in SOURCES)]
    digest = hashlib.sha256(repr((text, FLAGS, flags)).encode())
    for file in files:
        digest.update(file.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"bnconvert-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest.hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, built = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            source.write_text(text, "utf-8")
            assert COMPILER is not None
            command = [COMPILER, *FLAGS, *WARNINGS, *flags]
            command += [f"-I{HERE}", f"-I{sources}", str(source), "-o", str(built)]
            result = subprocess.run(  # noqa: S603 (a compiler, our arguments)
                command, capture_output=True, text=True, check=False
            )
            assert result.returncode == 0, result.stderr[:4000]
            built.replace(library)
    return library


def group_of(variant: Variant) -> tuple[Variant, ...]:
    """Return the variants that are compiled together with this one."""
    assert variant.kernel in KERNELS
    return tuple(
        v
        for v in all_variants()
        if (v.kernel, v.dtype, v.activation) == (variant.kernel, variant.dtype, variant.activation)
    )


@contextmanager
def small_blocks() -> Iterator[None]:
    """Divide small tensors among as many blocks and splits as large ones otherwise get."""
    kept = geometry.MAX_THREADS, geometry.VECTORS_PER_THREAD
    geometry.MAX_THREADS, geometry.VECTORS_PER_THREAD = 48, 1
    geometry.divide.cache_clear()
    try:
        yield
    finally:
        geometry.MAX_THREADS, geometry.VECTORS_PER_THREAD = kept
        geometry.divide.cache_clear()


class ShimError(AssertionError):
    """A launch broke a rule of CUDA."""


class ShimDriver:
    """A `native.Driver` for CPU tensors.

    Attributes:
        multiprocessors: Decides the number of blocks.
        seed: Decides the order of blocks and threads.
        sources: Folder of the kernel sources.
        flags: More options of the compiler.
        together: The variants to compile as one library; by default those of `group_of`.
        launched: The variants that were launched.
    """

    def __init__(
        self,
        multiprocessors: int = 1,
        seed: int = 1,
        sources: Path = FOLDER,
        flags: tuple[str, ...] = (),
        together: tuple[Variant, ...] = (),
    ) -> None:
        self.multiprocessors = multiprocessors
        self.seed = seed
        self.sources = sources
        self.flags = flags
        self.together = together
        self.launched: list[Variant] = []
        self._counters = torch.zeros(0, dtype=torch.int32)

    def counters(self, count: int) -> torch.Tensor:
        if self._counters.numel() < count:
            self._counters = torch.zeros(count, dtype=torch.int32)
        return self._counters

    def launch(
        self,
        variant: Variant,
        grid: tuple[int, int],
        block: tuple[int, int],
        shared_bytes: int,
        arguments: bytes,
    ) -> None:
        self.launched.append(variant)
        variants = self.together or group_of(variant)
        function = load(build(variants, self.flags, self.sources), variant.name)
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        message = function(
            (ctypes.c_uint * 2)(*grid),
            (ctypes.c_uint * 2)(*block),
            shared_bytes,
            (ctypes.c_void_p * 1)(ctypes.addressof(buffer)),
            len(arguments),
            self.seed,
        )
        if message is not None:
            raise ShimError(f"{variant.name}: {message.decode()}")
        if self._counters.any():
            raise ShimError(f"{variant.name}: a counter was not returned to zero")


@cache
def load(library: Path, name: str) -> Any:
    """Return the entry of a kernel in a compiled library."""
    function = getattr(ctypes.CDLL(str(library)), f"launch_{name}")
    function.restype = ctypes.c_char_p
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_uint64,
    ]
    return function
