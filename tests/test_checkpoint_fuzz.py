"""A short campaign of damaged files; `benchmarks/fuzz_checkpoint.py` is the long one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings

from tests.checkpoint_fuzz import HDF5, SEEDS, SPECIMENS, check, damaged, opened, use

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", [*SPECIMENS, *HDF5])
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    path = {**SPECIMENS, **HDF5}[name](tmp_path / "specimen.bin")
    assert use(opened(path)) == "read"
    content = path.read_bytes()

    @settings(
        max_examples=4 if name in HDF5 else 60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(SEEDS)
    def campaign(seed: int) -> None:
        check(path, damaged(content, seed))

    campaign()


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("DCP metadata", 9264),
        ("ONNX", 11557),
        ("Flax", 422946),
        ("torch.export", 1350),
        ("npz compressed", 760415505),
    ],
)
def test_damage_that_a_long_campaign_found(name: str, seed: int, tmp_path: Path) -> None:
    path = SPECIMENS[name](tmp_path / "specimen.bin")
    check(path, damaged(path.read_bytes(), seed))
