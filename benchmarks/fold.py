"""Time to fold, and latency before and after, in PyTorch and in onnxruntime.

    python -m benchmarks.fold [--json] [--rounds N] [--output FILE] [MODEL ...]

One thread, batch 1. PyTorch: the model, ours (module tree), the fuse of `torch.fx` and timm's
`reparameterize_model`. onnxruntime: torch's export of the model and of ours (graph form), without
and with clamps for activations. All variants of a model are run in turn, so that a busy machine
slows all of them, and medians are compared; ratios are original / variant, above 1 where the
variant is faster. A variant that fails or changes the result by more than 1e-3 is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.fold import fold_batchnorm, fold_exported
from bnconvert.report import format_table
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = (
    "resnet18",
    "resnet50",
    "mobilenetv3_small_100",
    "efficientnet_lite0",
    "densenet121",
    "levit_128s",
    "repvgg_a0",
    "fastvit_t8",
    "inception_next_atto",
    "regnety_002",
)
WARM_UP = 3
SAME = 1e-3


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="also write what is printed to a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [measure(name, options.rounds) for name in options.models]
    text = json.dumps(rows, indent=2) if options.json else "\n".join(format_table(table(rows)))
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def build(name: str) -> nn.Module:
    """Return a model with random weights and statistics, the same each time."""
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name).eval()
    randomize_batchnorm(model)
    return model


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of all variants of one model."""
    model = build(name)
    size: Any = model.default_cfg["input_size"]
    images = torch.randn((1, *size), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    ours = fold_batchnorm(build(name), images)
    seconds = time.perf_counter() - start
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = model(images)
        variants: dict[str, Callable[[], Any]] = {
            "torch": lambda: model(images),
            "torch ours": lambda: ours(images),
            **_peers(name, images),
            **_sessions(model, images, Path(folder)),
        }
        times = _in_turn({k: v for k, v in variants.items() if _agrees(v, expected)}, rounds)
    return {"model": name, "fold_s": seconds, "ms": times}


def _peers(name: str, images: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return the models that other tools make, where they make one."""
    from timm.utils.model import reparameterize_model
    from torch.fx.experimental.optimization import fuse

    made: dict[str, Callable[[], Any]] = {}
    for tool, make in (("torch.fx fuse", fuse), ("timm reparameterize", reparameterize_model)):
        try:
            other = make(build(name))
        except Exception as error:
            print(f"{name}: {tool}: {type(error).__name__}")
            continue
        made[tool] = lambda other=other: other(images)  # type: ignore[misc]
    return made


def _sessions(model: nn.Module, images: torch.Tensor, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return runs in onnxruntime of the plain export and of ours, with and without clamps."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    program = torch.export.export(model, (images,), strict=False)
    programs = {
        "ort": program,
        "ort ours": fold_exported(program, rewrite_activations=False),
        "ort ours, clamps": fold_exported(program),
    }
    runs: dict[str, Callable[[], Any]] = {}
    for label, each in programs.items():
        path = folder / f"{len(runs)}.onnx"
        torch.onnx.export(each, (), str(path), dynamo=True, optimize=True, verbose=False)
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: images.numpy()}
        runs[label] = lambda session=session, feed=feed: torch.from_numpy(  # type: ignore[misc]
            session.run(None, feed)[0]
        )
    return runs


def _agrees(variant: Callable[[], Any], expected: torch.Tensor) -> bool:
    difference = (variant() - expected).abs().max() / expected.abs().max()
    return bool(difference < SAME)


def _in_turn(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each variant, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(WARM_UP + rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if number >= WARM_UP:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table: milliseconds of the originals, ratios of the others."""
    torch_variants = ("torch ours", "torch.fx fuse", "timm reparameterize")
    ort_variants = ("ort ours", "ort ours, clamps")
    cells = [("model", "fold", "torch", *torch_variants, "ort", *ort_variants)]
    for row in rows:
        times = row["ms"]
        cells.append(
            (
                row["model"],
                f"{row['fold_s']:.1f} s",
                f"{times['torch']:.1f} ms",
                *(_ratio(times, "torch", name) for name in torch_variants),
                f"{times['ort']:.1f} ms",
                *(_ratio(times, "ort", name) for name in ort_variants),
            )
        )
    return cells


def _ratio(times: dict[str, float], original: str, name: str) -> str:
    return f"{times[original] / times[name]:.2f}x" if name in times else "-"


if __name__ == "__main__":
    main()
