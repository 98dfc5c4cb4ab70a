"""Compiles the kernels at run time with NVRTC, which comes with torch's CUDA wheels.

A variant is compiled once for an architecture: the result, a cubin, is kept in the folder
`$XDG_CACHE_HOME/bnconvert` (`~/.cache/bnconvert`), which all ranks share. Without a folder that can
be written, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnconvert.kernels.variants import Variant, headers, translation_unit

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST_ARCHITECTURE = 75
OPTIONS = ("-std=c++17",)

_DIGEST_BYTES = hashlib.sha256().digest_size
_LOG_PLACE = re.compile(
    r"^(?P<file>[\w.]+)\((?P<line>\d+)\): (?:error|catastrophic error)", re.MULTILINE
)


class KernelError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


def unavailable(architecture: int) -> str:
    """Return why kernels cannot be compiled for an architecture (90 for sm_90), "" if they can."""
    try:
        from cuda.bindings import nvrtc

        error, known = nvrtc.nvrtcGetSupportedArchs()
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as failure:
        return f"NVRTC cannot be loaded ({failure})"
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return f"NVRTC does not say what it supports ({error.name})"
    if architecture < OLDEST_ARCHITECTURE:
        return f"sm_{architecture} is older than sm_{OLDEST_ARCHITECTURE}"
    if architecture not in known:
        return f"NVRTC {major}.{minor} does not know sm_{architecture}"
    return ""


def cubin(variant: Variant, architecture: int) -> bytes:
    """Return the machine code of a variant, from the cache where it is there.

    Args:
        variant: What to compile.
        architecture: Compute capability without its dot, 90 for sm_90.

    Raises:
        KernelError: The source does not compile; the text has the line.
    """
    source = translation_unit([variant])
    path = cache_folder() / f"{variant.name}-sm_{architecture}-{_key(source, architecture)}.cubin"
    code = _read(path)
    if code is None:
        code = compile_source(source, architecture)
        _write(path, code)
    return code


def compile_source(
    source: str, architecture: int, include: Mapping[str, str] | None = None
) -> bytes:
    """Compile a translation unit.

    Args:
        source: The text, C++17.
        architecture: Compute capability without its dot.
        include: The files that it includes, by name; the kernel sources by default.

    Raises:
        KernelError: NVRTC refuses the source or fails.
    """
    from cuda.bindings import nvrtc

    files = headers() if include is None else include
    options = [option.encode() for option in (f"--gpu-architecture=sm_{architecture}", *OPTIONS)]
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            b"bnconvert.cu",
            len(files),
            [text.encode() for text in files.values()],
            [name.encode() for name in files],
        )
    )
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            text = log.rstrip(b"\0\n").decode(errors="replace")
            raise KernelError(
                f"NVRTC: {result.name} for sm_{architecture}\n"
                f"{_with_line(text, {**files, 'bnconvert.cu': source})}"
            )
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_folder() -> Path:
    """Return the folder of compiled kernels; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "bnconvert"


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what an NVRTC function gave besides its result code."""
    error, *values = result
    if error.value != 0:
        raise KernelError(f"NVRTC: {error.name}")
    return values[0] if values else None


def _with_line(log: str, files: Mapping[str, str]) -> str:
    """Return NVRTC's log after the first line of source that it complains about."""
    place = _LOG_PLACE.search(log)
    if place is None or place["file"] not in files:
        return log
    lines = files[place["file"]].splitlines()
    number = int(place["line"])
    line = lines[number - 1].strip() if number <= len(lines) else ""
    return f"{place['file']}:{number}: {line}\n{log}"


def _key(source: str, architecture: int) -> str:
    """Return a digest of all that the compiled code depends on."""
    from cuda.bindings import nvrtc

    result, *version = nvrtc.nvrtcVersion()
    _checked((result,))
    parts = (source, sorted(headers().items()), OPTIONS, version, architecture)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> bytes | None:
    """Return the code of a cached file, None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Keep the code for later processes; a rank that reads meanwhile sees all of it or nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(scratch).replace(path)
        except OSError:
            Path(scratch).unlink(missing_ok=True)
            raise
