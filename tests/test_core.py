"""Walking, reports, public names and packaging."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import bnconvert
from bnconvert import LayerReport, Outcome, Report
from bnconvert.walk import MAX_NAMES, find_norms

ROOT = Path(__file__).parent.parent


class Diamond(nn.Module):
    """Two edges to one child: 2**depth paths to the layer at the end."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.left = self.right = Diamond(depth - 1) if depth else nn.BatchNorm1d(3)


def test_shared_modules_are_visited_once_however_many_paths_lead_there() -> None:
    (norm,) = find_norms(Diamond(3))
    assert len(norm.names) == 16
    assert norm.names[:2] == ("left.left.left.left", "left.left.left.right")
    (norm,) = find_norms(Diamond(40))
    assert len(norm.names) == MAX_NAMES


def test_a_module_that_contains_itself_ends() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.again = model
    (norm,) = find_norms(model)
    assert norm.names == ("0",)


def test_very_deep_models_do_not_overflow() -> None:
    model: nn.Module = nn.BatchNorm1d(3)
    for _ in range(300):
        model = nn.Sequential(model)
    assert find_norms(model)[0].name == ".".join(["0"] * 300)


def test_a_report_groups_layers_and_puts_the_left_ones_last() -> None:
    report = Report(
        "convert",
        (
            LayerReport("c", "Own", Outcome.LEFT, reason="Own overrides forward"),
            LayerReport("a", "BatchNorm2d", Outcome.CONVERTED, now="Sync"),
            LayerReport("b", "BatchNorm2d", Outcome.CONVERTED, now="Sync"),
        ),
    )
    lines = str(report).splitlines()
    assert lines[0] == "convert: 2 converted, 1 left"
    assert lines[1].split() == ["a", "and", "1", "more", "BatchNorm2d", "converted", "Sync"]
    assert lines[2].split()[:3] == ["c", "Own", "left"]
    assert [layer.name for layer in report.left] == ["c"]
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["schema"], data["counts"]) == (1, {"converted": 2, "left": 1})
    assert [layer["name"] for layer in data["layers"]] == ["c", "a", "b"]
    assert (report + report).count(Outcome.LEFT) == 2
    assert str(report + Report("fold")).startswith("convert + fold: ")


def test_public_names_exist_and_importing_the_package_imports_nothing() -> None:
    for name in bnconvert.__all__:
        assert getattr(bnconvert, name) is not None, name
    assert not hasattr(bnconvert, "nonsense")
    program = "import bnconvert, sys; print('torch' in sys.modules, len(dir(bnconvert)) > 30)"
    done = subprocess.run(  # noqa: S603 (this interpreter)
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"], ["--version"]])
def test_help_imports_no_heavy_package(arguments: list[str]) -> None:
    program = (
        "import sys, click\n"
        "from bnconvert.cli.main import group\n"
        f"group({arguments!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'timm', 'onnx', 'onnxruntime', 'numpy', 'rich'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run(  # noqa: S603 (this interpreter)
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_packages_and_package_data_are_those_of_the_tree() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is new in Python 3.11")
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent for p in (ROOT / "bnconvert").rglob("*.py") if not p.parent.is_symlink()}
    expected = {".".join(p.relative_to(ROOT).parts) for p in folders}
    for package, folder in config["package-dir"].items():
        if "." in package:
            inside = {p.parent for p in (ROOT / folder).rglob("*.py")}
            parts = ((package, *p.relative_to(ROOT / folder).parts) for p in inside)
            expected |= {".".join(part) for part in parts}
    assert set(config["packages"]) == expected
    sources = {p.suffix for p in (ROOT / "kernels" / "cuda").iterdir()}
    patterns = config["package-data"]["bnconvert.kernels"]
    assert {f"cuda/*{suffix}" for suffix in sources} == set(patterns)
