"""The GPU benchmark without a GPU: it says so, invents no number and loses none that it has."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import compilation
from benchmarks.gpu.report import render
from benchmarks.gpu.results import Results

if TYPE_CHECKING:
    from pathlib import Path

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
def test_without_a_gpu_nothing_is_measured_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "ARCHITECTURES", (90,))
    page, raw = tmp_path / "gpu.md", tmp_path / "gpu.json"
    assert program.main(["--page", str(page), "--json", str(raw)]) == 0
    printed = capsys.readouterr().out
    assert "no CUDA device" in printed
    if importlib.util.find_spec("cuda") is not None:
        assert "sm_90: 4 kernels compiled" in printed
    assert not page.exists()
    assert not raw.exists()


def test_results_are_on_disk_after_every_step(tmp_path: Path) -> None:
    results = Results(tmp_path / "deep" / "gpu.json", seconds=100.0)
    results.fact("device", "some GPU")
    results.row("bandwidth", kernel="stats", GBps=3)
    kept = json.loads(results.path.read_text("utf-8"))
    assert kept["facts"] == {"device": "some GPU"}
    assert kept["rows"] == {"bandwidth": [{"kernel": "stats", "GBps": 3}]}
    assert [p.name for p in results.path.parent.iterdir()] == ["gpu.json"]


def test_a_failing_section_is_reported_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(results: Results) -> None:
        raise RuntimeError("no such kernel\nsecond line")

    results = Results(tmp_path / "gpu.json", seconds=100.0)
    program.run("first", fails, results)
    program.run("second", lambda r: r.check("goal: fast", passed=False), results)
    assert results.failed == ["first runs", "goal: fast"]
    assert results.data["checks"][0]["detail"] == "RuntimeError: no such kernel"


def test_a_section_without_time_is_skipped(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json", seconds=5.0)
    program.run("numerics", lambda r: r.check("never", passed=True), results)
    assert results.data["skipped"] == [{"name": "numerics", "reason": "no time left"}]
    assert results.data["checks"] == []


def test_the_page_holds_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json", seconds=100.0)
    results.fact("device", "some GPU")
    results.fact("date", "2026-01-02")
    results.check("numerics", passed=True, detail="0.02 of the tolerance")
    results.check("goal: fast", passed=False, detail="1.1x at least")
    results.row("bandwidth", kernel="stats", us=12.5)
    results.skip("racecheck", "it is not installed")
    page = render(results.data)
    for line in (
        "| device | some GPU |",
        "| numerics | yes | 0.02 of the tolerance |",
        "| goal: fast | **no** | 1.1x at least |",
        "## Bandwidth",
        "| stats | 12.5 |",
        "| racecheck | it is not installed |",
    ):
        assert line in page.splitlines()
    assert "one run on some GPU, 2026-01-02" in page
