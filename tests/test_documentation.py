"""What README and docs show runs as it stands there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from bnconvert.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "name", ["README.md", "docs/convert.md", "docs/checkpoints.md", "docs/finetune.md"]
)
def test_the_python_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks((ROOT / name).read_text(), "python")
    assert found
    for block in found:
        exec(compile(block, name, "exec"), {"__name__": "example"})  # noqa: S102 (our own page)
    assert "converted" in capsys.readouterr().out or name != "README.md"


def test_the_commands_of_the_quick_start_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(README, "console") for line in block.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ bnconvert ")]
    assert len(commands) == len(lines) > 4
    for command in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, command


def test_links_of_the_readme_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target
