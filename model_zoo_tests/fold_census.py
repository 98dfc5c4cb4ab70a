"""Count what folding and other tools leave of the BatchNorms of each timm family.

    python -m model_zoo_tests.fold_census [--results FILE] [--table FILE] [--only PATTERN] [--peers]

For the smallest model of each family (`docs/zoo-structure.md`) and some that are hard, with random
weights and statistics: where each BatchNorm goes in a module tree and in an exported program, and,
with `--peers`, how many BatchNorms are left by `torch.fx`'s fuse, by `torch.onnx.export` followed
by onnxruntime's optimizer, by onnxsim and by onnxslim (where these are installed). Results are kept
in a file; a second run goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path("build/fold-census.jsonl")
TABLE = Path("docs/fold-census.md")
FAMILIES = Path("docs/zoo-structure.md")
HARD = (
    "densenet121",
    "resnetv2_50",
    "resnetv2_18",
    "levit_128s",
    "visformer_tiny",
    "inception_next_atto",
    "efficientvit_m0",
    "nextvit_small",
    "swiftformer_xs",
    "xcit_nano_12_p8_224",
    "dpn48b",
    "repghostnet_050",
    "fastvit_t8",
    "repvit_m1",
    "repvgg_a0",
    "mobileone_s0",
    "convmixer_768_32",
)
"""Models of the issue that asked for folding, whose counts are known."""

_ABOUT_PEERS = (
    "The last columns say what other tools leave; the file that onnxruntime optimised is that of",
    "its extended level.",
)
PEERS = ("torch.fx fuse", "torch.onnx + onnxruntime", "onnxsim", "onnxslim")


def main() -> None:
    """Count the models that have no result yet, then write the table."""
    options = _parse()
    from model_zoo_tests.fold_zoo import progress, read

    results = read(options.results)
    names = [name for name in models() if fnmatch.fnmatchcase(name, options.only)]
    missing = [
        name
        for name in names
        if name not in results or (options.peers and "peers" not in results[name])
    ]
    started = time.monotonic()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    tasks = [(name, options.peers) for name in missing]
    with (
        context.Pool(1, maxtasksperchild=1) as pool,
        options.results.open("a", encoding="utf-8") as file,
    ):
        for result in progress(pool.imap(_one, tasks), len(tasks)):
            results[result["model"]] = result
            file.write(json.dumps(result) + "\n")
            file.flush()
            if time.monotonic() - started > options.minutes * 60:
                break
    text = table([results[name] for name in names if name in results])
    options.table.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--only", default="*", help="fnmatch pattern of model names")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--peers", action="store_true", help="measure other tools as well")
    return parser.parse_args()


def models() -> list[str]:
    """Return the hard models and the smallest of each family, hard ones first."""
    smallest: list[str] = []
    if FAMILIES.is_file():
        rows = re.findall(r"^\| \w+ \| \d+ \| (\w+) \|", FAMILIES.read_text("utf-8"), re.MULTILINE)
        smallest = list(rows)
    return list(dict.fromkeys([*HARD, *smallest]))


def _one(task: tuple[str, bool]) -> dict[str, Any]:
    """Count one model; never raises, because its result must be recorded."""
    name, with_peers = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return {"model": name, **count(name, with_peers=with_peers)}
    except Exception as error:
        return {"model": name, "failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with random weights and statistics, in eval mode, and two images for it."""
    import timm

    from bnconvert.testing import randomize_batchnorm
    from model_zoo_tests.fold_zoo import smallest_input

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name).eval()
    randomize_batchnorm(model)
    return model, smallest_input(model)


def count(name: str, *, with_peers: bool) -> dict[str, Any]:
    """Return the counts of one model in both forms, and of the other tools if asked."""
    from bnconvert.fold import plan_fold_batchnorm, plan_fold_exported

    model, images = build(name)
    with torch.no_grad():
        program = torch.export.export(model, (images,), strict=False)
    graph = plan_fold_exported(program)
    tree = plan_fold_batchnorm(model, images).report
    result = {
        "norms": len(tree.layers),
        "tree": {**dict(tree.ways), "left": len(tree.left)},
        "graph": {**dict(graph.report.ways), "left": len(graph.report.left)},
        "reasons": sorted({layer.reason for layer in tree.left}),
        "convs": [_convolutions(program), _convolutions(graph.apply())],
        "difference": [tree.proof.float64, tree.proof.own_dtype],
    }
    if with_peers:
        result["peers"] = peers(name)
    return result


def _convolutions(program: torch.export.ExportedProgram) -> int:
    return sum("aten.conv" in str(node.target) for node in program.graph.nodes)


def peers(name: str) -> dict[str, int | str]:
    """Return how many BatchNorms each other tool leaves, or how it fails."""
    model, images = build(name)
    counts = {"torch.fx fuse": _try(_fused, model)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        exported = _try(_exported, model, images, path)
        for peer, tool in zip(PEERS[1:], (_optimized, _onnxsim, _onnxslim), strict=True):
            counts[peer] = _try(tool, path) if path.is_file() else exported
    return counts


def _try(tool: Callable[..., int], *arguments: Any) -> int | str:
    try:
        return tool(*arguments)
    except ImportError:
        return "not installed"
    except Exception as error:
        return type(error).__name__


def _fused(model: nn.Module) -> int:
    from torch.fx.experimental.optimization import fuse

    return _traced_norms(fuse(model))


def _traced_norms(model: Any) -> int:
    """Return how many layers and functions of a traced graph are BatchNorms."""
    layers = [
        model.get_submodule(node.target) for node in model.graph.nodes if node.op == "call_module"
    ]
    norms = sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers)
    return norms + sum(node.target is F.batch_norm for node in model.graph.nodes)


def _exported(model: nn.Module, images: torch.Tensor, path: Path) -> int:
    torch.onnx.export(model, (images,), str(path), dynamo=True, optimize=True, verbose=False)
    return 0


def _optimized(path: Path) -> int:
    import onnx
    import onnxruntime

    session = onnxruntime.SessionOptions()
    # the level above turns BatchNormalization into depthwise convolutions of its own layout
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session.graph_optimization_level = level
    session.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    session.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), session, providers=["CPUExecutionProvider"])
    return _nodes(onnx.load(path.with_name("optimized.onnx"), load_external_data=False))


def _onnxsim(path: Path) -> int:
    import onnx
    import onnxsim

    return _nodes(onnxsim.simplify(onnx.load(path))[0])


def _onnxslim(path: Path) -> int:
    import onnx
    import onnxslim

    return _nodes(onnxslim.slim(onnx.load(path)))


def _nodes(model: Any) -> int:
    return sum(node.op_type == "BatchNormalization" for node in model.graph.node)


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all results as Markdown."""
    import timm

    peers = PEERS if any("peers" in result for result in results) else ()
    ways = ("backward", "forward", "across", "split", "reparameterized", "left")
    lines = [
        "# What is left of the BatchNorms of timm",
        "",
        (
            "Written by `python -m model_zoo_tests.fold_census` with timm "
            f"{timm.__version__} and torch {torch.__version__}, on random weights and statistics."
        ),
        "Columns: BatchNorm layers; in the module tree, how many went backward, forward (of these,",
        "across an activation that became a clamp), apart in both directions, into their block by",
        "its own method, and how many are left; in graph form, how many were merged with their",
        "branches and how many are left, and the number of convolutions before and after.",
        *(_ABOUT_PEERS if peers else ()),
        "",
        "| model | BN | "
        + " | ".join(ways)
        + " | merged | left in graph | convs |"
        + "".join(f" {peer} |" for peer in peers),
        "|" + "---|" * (5 + len(ways) + len(peers)),
    ]
    for result in results:
        if "failed" in result:
            lines.append(f"| {result['model']} | failed: {result['failed']} |")
            continue
        tree, graph = result["tree"], result["graph"]
        cells = [result["model"], result["norms"], *(tree.get(way, 0) for way in ways)]
        cells += [graph.get("merged", 0), graph["left"], " -> ".join(map(str, result["convs"]))]
        cells += [result.get("peers", {}).get(peer, "") for peer in peers]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, *_reasons(results)]) + "\n"


def _reasons(results: list[dict[str, Any]]) -> list[str]:
    lines = ["", "## Why layers are left in the module tree", ""]
    for result in results:
        lines += [f"- {result['model']}: {reason}" for reason in result.get("reasons", [])[:2]]
    return lines


if __name__ == "__main__":
    main()
