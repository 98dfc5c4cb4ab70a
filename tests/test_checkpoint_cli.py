"""`bnconvert checkpoint` on the command line: tables, JSON, exit codes, and nothing by surprise."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from bnconvert.checkpoint import load_checkpoint
from bnconvert.cli.main import main
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    randomize_batchnorm(model)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    del state["module.1.num_batches_tracked"]
    ema = {name: value * 2 for name, value in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": ema, "arch": "x"}, tmp_path / "c.pth.tar")
    return tmp_path / "c.pth.tar"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bnconvert", "checkpoint", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_file_is_shown_as_table_and_json(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, source) == 0
    table = capsys.readouterr().out
    assert "torch zip, timm (x)" in table
    assert "auto chose the EMA weights" in table
    assert run(monkeypatch, source, "--raw", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["tensors"]["1.running_var"] == {"shape": [4], "dtype": "float32"}
    assert list(told["batchnorm"]) == ["1"]


def test_converting_writes_the_choice_and_prints_every_layer(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = source.parent / "o.safetensors"
    assert run(monkeypatch, source, "-o", output, "--raw", "--dry-run") == 0
    assert not output.exists()
    dry = capsys.readouterr().out
    assert run(monkeypatch, source, "-o", output, "--raw", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layers"][0]["outcome"] == "rewritten"
    assert "num_batches_tracked added" in dry
    loaded = load_checkpoint(output).tensors
    raw = load_checkpoint(source, weights="raw").tensors
    assert torch.equal(loaded["1.weight"], raw["1.weight"])
    assert run(monkeypatch, source, "-o", output) == 1
    assert "--force" in capsys.readouterr().err
    assert run(monkeypatch, source, "-o", output, "--force", "--dtype", "bf16") == 0
    assert load_checkpoint(output).tensors["0.weight"].dtype is torch.bfloat16


def test_options_without_an_output_and_unknown_values_are_usage_errors(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, source, "--dtype", "fp16") == 2
    assert "-o DST" in capsys.readouterr().err
    assert run(monkeypatch, source, "-o", source.parent / "x", "--dtype", "int8") == 2


def test_a_refusal_is_one_line_and_strict_counts_what_was_left(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (source.parent / "bad.pt").write_bytes(b"PK\3\4" + b"\0" * 50)
    assert run(monkeypatch, source.parent / "bad.pt") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    state = nn.BatchNorm2d(3).state_dict()
    torch.save({"bn." + name: value for name, value in state.items()}, source.parent / "new.pt")
    output = source.parent / "n.safetensors"
    assert run(monkeypatch, source.parent / "new.pt", "-o", output, "--strict") == 3
    assert "look untouched" in capsys.readouterr().out
