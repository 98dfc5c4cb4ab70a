"""Compilation of the kernels: that all architectures take them, what comes out, and the cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from bnconvert.kernels import nvrtc
from bnconvert.kernels.variants import (
    KERNELS,
    SCALARS,
    Variant,
    all_variants,
    headers,
    translation_unit,
    widths,
)
from tests.sass import cuobjdump, disassemble

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None,
    reason="this torch comes without cuda.bindings, as its CPU wheels do",
)

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

INSTRUCTIONS_PER_ELEMENT = {
    ("stats", "none"): 5.0,
    ("normalize", "none"): 5.0,
    ("normalize", "relu"): 7.0,
    ("normalize", "leaky_relu"): 8.0,
    ("normalize", "silu"): 9.0,
    ("backward_reduce", "none"): 7.0,
    ("backward_reduce", "relu"): 10.0,
    ("backward_reduce", "leaky_relu"): 10.0,
    ("backward_reduce", "silu"): 14.5,
    ("backward_input", "none"): 7.5,
    ("backward_input", "relu"): 10.5,
    ("backward_input", "leaky_relu"): 11.0,
    ("backward_input", "silu"): 15.5,
}
"""In the loop over the elements, bfloat16, channels last, sm_90. An H200 has time for about 15."""


def some_variants(rotation: int) -> list[Variant]:
    """Return one variant per kernel and dtype; another one for another rotation."""
    chosen = []
    groups: dict[tuple[str, torch.dtype], list[Variant]] = {}
    for variant in all_variants():
        groups.setdefault((variant.kernel, variant.dtype), []).append(variant)
    for index, group in enumerate(groups.values()):
        chosen.append(group[(5 * rotation + index) % len(group)])
    return chosen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills(architecture: int) -> None:
    # `python -m benchmarks.kernel_code` does this for every variant.
    variants = some_variants(ARCHITECTURES.index(architecture))
    code = nvrtc.compile_source(translation_unit(variants), architecture)
    if cuobjdump() is None:
        pytest.skip("needs the cuobjdump of Triton's wheel")
    kernels = disassemble(code)
    assert set(kernels) == {v.name for v in variants}
    for name, kernel in kernels.items():
        assert (kernel.stack, kernel.local) == (0, 0), name
        assert kernel.count(r"\b(LDL|STL)\b") == 0, name
        assert kernel.registers <= 128, name


@pytest.mark.skipif(cuobjdump() is None, reason="needs the cuobjdump of Triton's wheel")
@pytest.mark.parametrize("dtype", SCALARS)
def test_widest_variants_move_16_bytes_with_few_instructions(dtype: torch.dtype) -> None:
    bfloat16 = dtype == torch.bfloat16
    variants = [
        v
        for v in all_variants()
        if v.dtype == dtype
        and v.width == widths(dtype)[0]
        and not v.residual
        and (v.channels_last or v.activation == "relu" or v.kernel == "stats")
        and (bfloat16 or v.activation in ("none", "relu"))
    ]
    kernels = disassemble(nvrtc.compile_source(translation_unit(variants), 90))
    for variant in variants:
        loop = kernels[variant.name].hot_loop()
        loads, wide = loop.count(r"\bLDG\b"), loop.count(r"\bLDG\.E\.128\b")
        assert loads == wide > 1, variant.name
        streams = 2 if variant.kernel.startswith("backward") else 1
        writes = variant.kernel in ("normalize", "backward_input")
        assert loop.count(r"\bSTG\b") == loop.count(r"\bSTG\.E\.128\b"), variant.name
        assert loop.count(r"\bSTG\b") == (loads // streams if writes else 0), variant.name
        assert loop.count(r"\b(CALL|MUFU\.RSQ|DADD|DMUL|DFMA)\b") == 0, variant.name
        if bfloat16 and variant.channels_last:
            elements = variant.width * loads / streams
            per_element = len(loop.instructions) / elements
            limit = INSTRUCTIONS_PER_ELEMENT[variant.kernel, variant.activation]
            assert 0.75 * limit < per_element <= limit, (variant.name, per_element)


def test_the_sources_name_every_kernel_and_each_name_once() -> None:
    variants = all_variants()
    assert len({v.name for v in variants}) == len(variants)
    assert {v.kernel for v in variants} == set(KERNELS)
    folder = Path(nvrtc.__file__).parent / "cuda"
    assert {p.name for p in folder.iterdir()} == set(headers())


def test_a_compile_error_shows_the_line() -> None:
    broken = dict(headers())
    broken["stats.cuh"] = broken["stats.cuh"].replace("float sums[2 * A] = {};", "flot sums = {};")
    source = translation_unit([Variant("stats", torch.float32, True, 4)])
    with pytest.raises(nvrtc.KernelError) as failure:
        nvrtc.compile_source(source, 90, broken)
    line = next(
        number
        for number, text in enumerate(broken["stats.cuh"].splitlines(), 1)
        if "flot sums" in text
    )
    assert f"stats.cuh:{line}: flot sums = {{}};" in str(failure.value)
    assert 'identifier "flot" is undefined' in str(failure.value)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [(90, ""), (70, "sm_70 is older than sm_75"), (999, "does not know sm_999")],
)
def test_unavailable_architectures_are_named(architecture: int, reason: str) -> None:
    actual = nvrtc.unavailable(architecture)
    assert reason in actual
    assert bool(actual) == bool(reason)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Count compilations, which take no time here; the cache is an empty folder."""
    done: list[str] = []

    def compile_source(source: str, architecture: int) -> bytes:
        done.append(source)
        return f"code {len(done)} for {architecture}".encode()

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return done


STATS = Variant("stats", torch.float32, True, 4)


def test_a_variant_is_compiled_once(compilations: list[str], tmp_path: Path) -> None:
    assert nvrtc.cubin(STATS, 90) == nvrtc.cubin(STATS, 90) == b"code 1 for 90"
    assert nvrtc.cubin(STATS, 80) == b"code 2 for 80"
    assert len(compilations) == 2
    assert len(list((tmp_path / "bnconvert").iterdir())) == 2  # and no scratch file


def test_other_sources_and_versions_are_compiled_again(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import nvrtc as bindings

    nvrtc.cubin(STATS, 90)
    version = bindings.nvrtcVersion()
    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (version[0], 99, 9))
    assert nvrtc.cubin(STATS, 90) == b"code 2 for 90"
    monkeypatch.setattr(nvrtc, "headers", lambda: {"stats.cuh": "changed"})
    assert nvrtc.cubin(STATS, 90) == b"code 3 for 90"
    monkeypatch.setattr(nvrtc, "OPTIONS", ("-std=c++20",))
    assert nvrtc.cubin(STATS, 90) == b"code 4 for 90"


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_files_of_the_cache_are_replaced(
    compilations: list[str], tmp_path: Path, damage: str
) -> None:
    nvrtc.cubin(STATS, 90)
    (path,) = (tmp_path / "bnconvert").iterdir()
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes({"truncate": data[:-3], "flip": flipped, "empty": b""}[damage])
    assert nvrtc.cubin(STATS, 90) == b"code 2 for 90"
    assert nvrtc.cubin(STATS, 90) == b"code 2 for 90"


def test_cache_folder_that_cannot_be_written(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert nvrtc.cubin(STATS, 90) == b"code 1 for 90"
    assert nvrtc.cubin(STATS, 90) == b"code 2 for 90"


def test_full_disk_leaves_no_scratch_file(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    assert nvrtc.cubin(STATS, 90) == b"code 1 for 90"
    assert list((tmp_path / "bnconvert").iterdir()) == []


def test_without_a_cache_variable_the_home_folder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert nvrtc.cache_folder() == Path.home() / ".cache" / "bnconvert"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert nvrtc.cache_folder() == Path.home() / ".cache" / "bnconvert"
