"""Compare two models, torch modules or ONNX files, on the same inputs."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.arguments import Arguments, data_config, make_arguments, random_images
from bnconvert.errors import BnconvertError
from bnconvert.images import load_images
from bnconvert.report import SCHEMA, format_table
from bnconvert.runners import OnnxRunner, Runner, TorchRunner, relative_difference

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


@dataclass(frozen=True)
class OutputDifference:
    """How one output differs.

    Attributes:
        name: Name of the output in the first model.
        shape: Its shape in the first model.
        relative: max|a - b| / max|b|.
        absolute: max|a - b|.
    """

    name: str
    shape: tuple[int, ...]
    relative: float
    absolute: float


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`; `str()` is its table.

    Attributes:
        a: Name of the first model.
        b: Name of the second model; relative differences are relative to its outputs.
        inputs: What both were run on, in words.
        outputs: One entry per output.
        top1: Share of the rows whose largest class is the same; None when no output has classes.
        top5: Mean share of each row's five largest classes that both have.
    """

    a: str
    b: str
    inputs: str
    outputs: tuple[OutputDifference, ...]
    top1: float | None
    top5: float | None

    @property
    def largest_difference(self) -> float:
        """The largest relative difference of all outputs."""
        return max(output.relative for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, ready for JSON."""
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "inputs": self.inputs,
            "largest_difference": self.largest_difference,
            "top1": self.top1,
            "top5": self.top5,
            "outputs": [asdict(output) for output in self.outputs],
        }

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b} on {self.inputs}"]
        rows: list[tuple[str, ...]] = [("output", "shape", "relative", "absolute")]
        for output in self.outputs:
            shape = "x".join(map(str, output.shape)) or "scalar"
            rows.append((output.name, shape, f"{output.relative:.1e}", f"{output.absolute:.1e}"))
        lines += format_table(rows)
        lines.append(f"largest difference: {self.largest_difference:.1e} relative")
        if self.top1 is not None and self.top5 is not None:
            lines.append(f"agreement: top-1 {self.top1:.1%}, top-5 {self.top5:.1%}")
        return "\n".join(lines)


def compare(
    a: nn.Module | str | os.PathLike[str],
    b: nn.Module | str | os.PathLike[str],
    inputs: Any = None,
    *,
    images: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Run two models on the same inputs and measure how their outputs differ.

    Torch modules are run as they are, in eval mode; their modes are put back afterwards.

    Args:
        a: A torch module or the path of an ONNX file.
        b: Likewise; the reference of relative differences.
        inputs: A tensor, a tuple of positional or a dict of keyword arguments. None takes images,
            or random values of the size that either model states.
        images: A folder of images, prepared as the torch model's timm configuration says.

    Raises:
        BnconvertError: A model does not run, the outputs do not pair up, or there are no inputs.
    """
    if inputs is not None and images is not None:
        raise BnconvertError("compare: both inputs and images are given; pass one of them")
    runners = [_runner(a), _runner(b)]
    arguments, described = _arguments((a, b), runners, inputs, images)
    with _eval_mode(a, b):
        values, reference = (runner.run(arguments) for runner in runners)
    if len(values) != len(reference):
        raise BnconvertError(
            f"compare: {runners[0].name} gives {len(values)} outputs, {runners[1].name} gives "
            f"{len(reference)}; compare models with the same outputs"
        )
    pairs = list(zip(values.items(), reference.values(), strict=True))
    outputs = tuple(_difference(name, x, y) for (name, x), y in pairs)
    top = next((_agreement(x, y) for (_, x), y in pairs if _has_classes(x, y)), (None, None))
    return Comparison(runners[0].name, runners[1].name, described, outputs, *top)


def _runner(model: nn.Module | str | os.PathLike[str]) -> Runner:
    if isinstance(model, nn.Module):
        return TorchRunner(model)
    path = Path(model)
    if not path.is_file():
        raise BnconvertError(f"{path}: there is no such file; pass a module or an ONNX file")
    return OnnxRunner(path)


def _arguments(
    models: tuple[Any, Any],
    runners: list[Runner],
    inputs: Any,
    images: str | os.PathLike[str] | None,
) -> tuple[Arguments, str]:
    """Return what to run on, and what that is in words."""
    modules = [model for model in models if isinstance(model, nn.Module)]
    if images is not None:
        if not modules:
            raise BnconvertError("compare: images need a torch model that says how to prepare them")
        batch = load_images(Path(images), data_config(modules[0]))
        return Arguments((batch,), {}), f"{len(batch)} images"
    if inputs is not None:
        return make_arguments(nn.Identity(), inputs), "the given inputs"
    if modules:
        return make_arguments(modules[0], None), "2 random images"
    files = [runner for runner in runners if isinstance(runner, OnnxRunner)]
    return _random_inputs(files[0]), "random inputs"


def _random_inputs(runner: OnnxRunner) -> Arguments:
    """Return random values for each input of an ONNX file, two rows where the batch is open."""
    values = {}
    for seed, entry in enumerate(runner.inputs):
        shape = [
            2 if axis == 0 and not isinstance(n, int) else n for axis, n in enumerate(entry.shape)
        ]
        if entry.type != "tensor(float)" or not all(isinstance(n, int) for n in shape):
            raise BnconvertError(
                f"{runner.name}: input {entry.name} is {entry.type} of shape {entry.shape}; "
                "pass inputs"
            )
        values[entry.name] = random_images(tuple(shape[1:]), shape[0], seed)
    return Arguments((), values)


@contextlib.contextmanager
def _eval_mode(*models: Any) -> Iterator[None]:
    """Put modules into eval mode, and each of their children back to its own mode after."""
    modules = [m for model in models if isinstance(model, nn.Module) for m in model.modules()]
    modes = [module.training for module in modules]
    for model in models:
        if isinstance(model, nn.Module):
            model.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _difference(name: str, value: torch.Tensor, reference: torch.Tensor) -> OutputDifference:
    relative = relative_difference(value, reference)
    absolute = float("inf")
    if value.shape == reference.shape:
        gap = (value.double() - reference.double()).abs()
        absolute = gap.max().item() if gap.numel() else 0.0
    return OutputDifference(name, tuple(value.shape), relative, absolute)


def _has_classes(value: torch.Tensor, reference: torch.Tensor) -> bool:
    return value.shape == reference.shape and value.ndim == 2 and value.shape[1] > 1


def _agreement(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the top-1 and top-5 agreement of two (rows, classes) outputs."""
    top1 = (value.argmax(1) == reference.argmax(1)).double().mean().item()
    k = min(5, value.shape[1])
    both = value.topk(k).indices.unsqueeze(2) == reference.topk(k).indices.unsqueeze(1)
    return top1, both.any(2).double().mean().item()
