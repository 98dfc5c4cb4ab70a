"""Convert and revert every timm model that has BatchNorm, structurally, on the meta device.

    python -m model_zoo_tests.structure [--summary FILE] [--only PATTERN]

No weights are made, so all models fit. Checked for each: conversion changes the class of every
norm layer and nothing else, and reverting gives the exact classes back. The summary names the
smallest model of each family, which the tests with real numbers use.
"""

from __future__ import annotations

import argparse
import fnmatch
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch

from bnconvert import Outcome, plan_convert_sync_batchnorm, plan_revert_sync_batchnorm
from bnconvert.walk import find_norms

if TYPE_CHECKING:
    from torch import nn

SUMMARY = Path("docs/zoo-structure.md")


@dataclass(frozen=True)
class Result:
    """What happened to one model.

    Attributes:
        name: timm name.
        family: Module of timm that defines it.
        parameters: Number of parameters.
        norms: Number of BatchNorm layers; 0 where it has none.
        problem: What went wrong, or "".
    """

    name: str
    family: str
    parameters: int
    norms: int
    problem: str


def snapshot(model: nn.Module) -> list[Any]:
    """Return what conversion has to keep, in the order of the model."""
    return [
        *((name, id(m)) for name, m in model.named_modules(remove_duplicate=False)),
        *((name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)),
        *((name, id(b)) for name, b in model.named_buffers(remove_duplicate=False)),
        list(model.state_dict()),
    ]


def check(model: nn.Module) -> str:
    """Convert and revert; return what differs, or ""."""
    before, classes = snapshot(model), [type(m) for m in model.modules()]
    norms = find_norms(model)
    plan = plan_convert_sync_batchnorm(model)
    left = plan.report.left
    if left:
        return f"{len(left)} left, first {left[0].name}: {left[0].reason}"
    plan.apply()
    if snapshot(model) != before:
        return "conversion changed more than classes"
    if not all(isinstance(m, c) for m, c in zip(model.modules(), classes, strict=True)):
        return "a converted layer is no instance of the class from before"
    back = plan_revert_sync_batchnorm(model)
    if back.report.count(Outcome.REVERTED) != len(norms):
        return f"{back.report.count(Outcome.REVERTED)} of {len(norms)} layers were reverted"
    back.apply()
    if [type(m) for m in model.modules()] != classes or snapshot(model) != before:
        return "reverting did not restore the model"
    return ""


def examine(name: str) -> Result:
    """Build one model on the meta device and check it."""
    family = inspect.getmodule(timm.model_entrypoint(name)).__name__.rpartition(".")[2]  # type: ignore[union-attr]
    try:
        with torch.device("meta"):
            model = timm.create_model(name)
    except Exception as error:
        return Result(name, family, 0, 0, f"cannot be built on meta: {type(error).__name__}")
    norms = len(find_norms(model))
    parameters = sum(p.numel() for p in model.parameters())
    return Result(name, family, parameters, norms, check(model) if norms else "")


def summarize(results: list[Result]) -> str:
    """Return the summary as Markdown."""
    with_norms = [r for r in results if r.norms]
    problems = [r for r in results if r.problem]
    smallest: dict[str, Result] = {}
    for result in sorted(with_norms, key=lambda r: (r.parameters, r.name)):
        smallest.setdefault(result.family, result)
    found = (
        f"timm {timm.__version__}, torch {torch.__version__}: {len(results)} models, "
        f"{len(with_norms)} with BatchNorm ({sum(r.norms for r in with_norms)} layers, "
        f"{len(smallest)} families), {len(problems)} problems."
    )
    lines = [
        "# Conversion of the whole timm zoo, structurally",
        "",
        "Written by `make zoo`: every model is built on the meta device, converted and reverted.",
        "",
        found,
        "",
        "| family | models | smallest | parameters | BatchNorm layers |",
        "|---|---|---|---|---|",
    ]
    for family, first in sorted(smallest.items()):
        count = sum(r.family == family for r in with_norms)
        lines.append(
            f"| {family} | {count} | {first.name} | {first.parameters:,} | {first.norms} |"
        )
    if problems:
        lines += ["", "## Problems", "", *(f"- {r.name}: {r.problem}" for r in problems)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Examine every model and write the summary."""
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--only", default="*", help="fnmatch pattern of model names")
    options = parser.parse_args()
    names = [name for name in timm.list_models() if fnmatch.fnmatchcase(name, options.only)]
    results = [examine(name) for name in track(names, description="models")]
    text = summarize(results)
    options.summary.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
