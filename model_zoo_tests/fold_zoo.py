"""Fold every timm model that has a BatchNorm, and say what came of it.

    python -m model_zoo_tests.fold_zoo [--results FILE] [--summary FILE] [--jobs N] [--only PATTERN]

Each model is built with random weights and random statistics, and folded with its proof at the
smallest input that it takes. Results are appended to a file, one JSON object a line; a second run
goes on where the first one ended. Failures are listed last. The results in `docs` belong to the
versions that the summary beside them names; without that file everything is done anew.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

RESULTS = Path("docs/fold-zoo.jsonl")
SUMMARY = Path("docs/fold-zoo.md")
SIZES = (32, 64, 96, 128, 160, 192, 224, 240, 256, 288, 320, 384, 448, 512)
CALMER = 0.3  # random weights are scaled by this where they magnify rounding beyond any proof
BYTES_PER_PARAMETER = 28  # the model, its float64 mirror, and the weights being folded


def main() -> None:
    """Run the models that have no result yet, then write the summary."""
    options = _parse()
    results = read(options.results)
    names = [name for name in all_models() if fnmatch.fnmatchcase(name, options.only)]
    missing = [name for name in names if name not in results]
    random.Random(0).shuffle(missing)  # noqa: S311 (a run that is cut short has seen all families)
    started = time.monotonic()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    limit = options.memory * 1e9
    context = multiprocessing.get_context("fork")
    tasks = [(name, limit) for name in missing]
    with (
        context.Pool(options.jobs, initializer=_start, maxtasksperchild=20) as pool,
        options.results.open("a", encoding="utf-8") as file,
    ):
        for result in progress(pool.imap_unordered(_one, tasks), len(tasks)):
            results[result["model"]] = result
            file.write(json.dumps(result) + "\n")
            file.flush()
            if time.monotonic() - started > options.minutes * 60:
                break
    text = summarise([results[name] for name in names if name in results], len(names))
    options.summary.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--memory", type=float, default=6.0, help="gigabytes for one model")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--only", default="*", help="fnmatch pattern of model names")
    return parser.parse_args()


def all_models() -> list[str]:
    """Return the names of all models of the installed timm."""
    import timm

    names: list[str] = timm.list_models()
    return names


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a file by model; a last line that was cut off is dropped."""
    results = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            results[result["model"]] = result
    return results


def progress(results: Any, total: int) -> Any:
    """Yield results of models and show how far it is."""
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("folding", total=total)
        for result in results:
            bar.update(task, advance=1, description=result["model"])
            yield result


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _one(task: tuple[str, float]) -> dict[str, Any]:
    """Fold one model; never raises, because its result must be recorded."""
    name, limit = task
    started = time.monotonic()
    try:
        result = fold_model(name, limit)
    except Exception as error:
        text = str(error).strip().splitlines()
        result = {"status": "failed", "why": f"{type(error).__name__}: {text[0] if text else ''}"}
    return {"model": name, **result, "seconds": round(time.monotonic() - started, 1)}


def fold_model(name: str, limit: float) -> dict[str, Any]:
    """Return what folding does to one model.

    Args:
        name: A timm name.
        limit: Bytes that the model and its copies may take.
    """
    import timm

    from bnconvert.errors import VerificationError
    from bnconvert.fold import plan_fold_batchnorm
    from bnconvert.testing import randomize_batchnorm
    from bnconvert.walk import find_norms

    with torch.device("meta"):
        norms = find_norms(timm.create_model(name))
    if not norms:
        return {"status": "no BatchNorm"}
    torch.manual_seed(0)
    parameters = sum(p.numel() for p in _on_meta(name).parameters())
    if parameters * BYTES_PER_PARAMETER > limit:
        gigabytes = parameters * BYTES_PER_PARAMETER / 1e9
        return {"status": "too large", "why": f"needs {gigabytes:.0f} GB", "parameters": parameters}
    model = timm.create_model(name).eval()
    randomize_batchnorm(model)
    images = smallest_input(model)
    scale = 1.0
    try:
        report = plan_fold_batchnorm(model, images).report
    except VerificationError:
        scale = CALMER
        for norm in find_norms(model):
            weight = getattr(norm.module, "weight", None)
            if isinstance(weight, torch.Tensor):
                weight.data.mul_(scale)
        report = plan_fold_batchnorm(model, images).report
    assert report.proof is not None  # verify is on
    return {
        "status": "folded",
        "scale": scale,
        "input": list(images.shape),
        "norms": len(report.layers),
        "left": len(report.left),
        "ways": dict(report.ways),
        "float64": report.proof.float64,
        "own_dtype": report.proof.own_dtype,
        "why": _most_frequent(layer.reason for layer in report.left),
    }


def _most_frequent(reasons: Iterable[str]) -> str:
    counted = Counter(reasons).most_common(1)
    return counted[0][0] if counted else ""


def _on_meta(name: str) -> torch.nn.Module:
    import timm

    with torch.device("meta"):
        model: torch.nn.Module = timm.create_model(name)
    return model


def smallest_input(model: torch.nn.Module) -> torch.Tensor:
    """Return two random images of the smallest size that a model takes.

    Raises:
        RuntimeError: The model takes none of the sizes tried.
    """
    channels, *own = model.default_cfg["input_size"]  # type: ignore[index, union-attr]
    generator = torch.Generator().manual_seed(0)
    reason = ""
    for size in [*((size, size) for size in SIZES if size < max(own)), tuple(own)]:
        images = torch.randn((2, channels, *size), generator=generator)
        try:
            with torch.no_grad():
                model(images)
        except (RuntimeError, AssertionError, ValueError, IndexError) as error:
            reason = str(error)
        else:
            return images
    raise RuntimeError(f"takes no input up to {tuple(own)}: {reason}")


def summarise(results: list[dict[str, Any]], total: int) -> str:
    """Return the summary of the results for some or all of the models, failures last."""
    import timm

    by_status = {
        status: [result for result in results if result["status"] == status]
        for status in ("folded", "no BatchNorm", "too large", "failed")
    }
    folded = by_status["folded"]
    norms, left = (sum(result[key] for result in folded) for key in ("norms", "left"))
    without, whole = len(by_status["no BatchNorm"]), sum(not r["left"] for r in folded)
    wide = max((result["float64"] for result in folded), default=0.0)
    own = max((result["own_dtype"] for result in folded), default=0.0)
    lines = [
        "# Folding the whole of timm",
        "",
        f"Written by `python -m model_zoo_tests.fold_zoo` with timm {timm.__version__} and torch",
        f"{torch.__version__}: module trees, random weights and statistics, each proved in float64",
        "at the smallest input that the model takes.",
        "",
        f"- models looked at: {len(results)} of {total}, with BatchNorm: {len(results) - without}",
        f"- folded and proved: {len(folded)}; every BatchNorm in {whole} of them",
        f"- BatchNorm layers in them: {norms}, of which {norms - left} are folded and {left} left",
        f"- largest relative difference: {wide:.1e} in float64, {own:.1e} in float32",
        f"- too large for the memory given: {len(by_status['too large'])}",
        f"- failed: {len(by_status['failed'])}",
    ]
    calmer = [result["model"] for result in folded if result.get("scale", 1.0) != 1]
    if calmer:
        lines += [
            f"- with the random weights of BatchNorm scaled by {CALMER}, because at full size they",
            f"  magnify rounding until nothing can be proved: {', '.join(calmer)}",
        ]
    lines += _partly(folded)
    for title, status in (("Too large", "too large"), ("Failed", "failed")):
        if by_status[status]:
            lines += ["", f"## {title}", ""]
            lines += [f"- `{result['model']}`: {result['why']}" for result in by_status[status]]
    return "\n".join(lines) + "\n"


def _partly(folded: list[dict[str, Any]]) -> list[str]:
    """Return the section on models that keep BatchNorm layers, with the most frequent reason."""
    partly = [result for result in folded if result["left"]]
    if not partly:
        return []
    lines = ["", "## Models that keep BatchNorm layers", "", "| model | left of | such as |"]
    lines.append("|---|---|---|")
    lines += [f"| {r['model']} | {r['left']} of {r['norms']} | {r['why']} |" for r in partly]
    return lines


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
