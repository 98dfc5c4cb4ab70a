"""The ONNX files that bnconvert and its peers make of the same model.

The peers are `torch.onnx.export(optimize=True)`, and what onnxsim and onnxslim make of that file:
`pip install onnxsim onnxslim`. One that is not installed has no column.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
import torch

from bnconvert.arguments import Arguments
from bnconvert.comparison.runners import OnnxRunner, RuntimeLevel, TorchRunner, largest_difference
from bnconvert.export import export_onnx

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

OURS, TORCH = "bnconvert", "torch"
SIMPLIFIERS = ("onnxsim", "onnxslim")


@dataclass(frozen=True)
class Made:
    """One file, or why there is none.

    Attributes:
        maker: Who made it.
        path: The file; None when it failed.
        seconds: Time to make it; of simplifiers without the export before.
        problem: What went wrong, or "".
    """

    maker: str
    path: Path | None
    seconds: float
    problem: str = ""


def make_all(model: nn.Module, images: torch.Tensor, folder: Path) -> list[Made]:
    """Return the files of everyone for one model in eval mode.

    Args:
        model: The model.
        images: Two example images.
        folder: Where the files go.
    """
    made = [_timed(OURS, folder, lambda path: export_onnx(model, path, images, overwrite=True))]
    plain = _timed(TORCH, folder, lambda path: _torch_export(model, images, path))
    made.append(plain)
    for name, simplify in zip(SIMPLIFIERS, (_onnxsim, _onnxslim), strict=True):
        if importlib.util.find_spec(name) is None:
            continue
        if plain.path is None:
            made.append(Made(name, None, 0.0, "there is no file to simplify"))
        else:
            source = plain.path
            made.append(_timed(name, folder, lambda path, s=simplify, f=source: s(f, path)))
    return made


def _timed(maker: str, folder: Path, make: object) -> Made:
    path = folder / f"{maker}.onnx"
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            make(path)  # type: ignore[operator]
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Made(maker, None, time.perf_counter() - start, lines[0] if lines else repr(error))
    return Made(maker, path, time.perf_counter() - start)


def _torch_export(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    torch.onnx.export(
        model,
        (images,),
        path,
        dynamo=True,
        optimize=True,
        external_data=False,
        verbose=False,
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )


def _onnxsim(source: Path, path: Path) -> None:
    import onnxsim

    simplified, ok = onnxsim.simplify(onnx.load(source))
    if not ok:
        raise RuntimeError("its own check failed")
    onnx.save(simplified, path)


def _onnxslim(source: Path, path: Path) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(source)), path)


@dataclass(frozen=True)
class Measured:
    """What is in a file, and how far it is from the model in float64.

    Attributes:
        nodes: Number of nodes.
        norms: Number of BatchNormalization nodes.
        size: Bytes.
        errors: Relative difference by runtime level: the largest over the outputs, the median
            over the inputs. That of one input is mostly luck of rounding.
    """

    nodes: int
    norms: int
    size: int
    errors: dict[str, float]


def measure(path: Path, cases: Sequence[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> Measured:
    """Return the figures of one file.

    Args:
        path: The file.
        cases: Images to run it on, and the outputs of the model in float64 on them.
    """
    operators = [node.op_type for node in onnx.load(path).graph.node]
    errors = {}
    for level in RuntimeLevel:
        runner = OnnxRunner(path, level)
        errors[level.value] = statistics.median(
            largest_difference(runner.run(Arguments((images,), {})), exact)
            for images, exact in cases
        )
    norms = operators.count("BatchNormalization")
    return Measured(len(operators), norms, path.stat().st_size, errors)


def in_float64(
    model: nn.Module, inputs: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return inputs with the outputs of a model in float64; the model stays in float32."""
    try:
        runner = TorchRunner(model.double())
        return [(images, runner.run(Arguments((images.double(),), {}))) for images in inputs]
    finally:
        model.float()
