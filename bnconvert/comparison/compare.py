"""Compare two models, torch modules or ONNX files, on the same inputs."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnconvert.comparison.inputs import Inputs, choose_inputs
from bnconvert.comparison.layerwise import module_layers, onnx_layers
from bnconvert.comparison.runners import (
    OnnxRunner,
    TorchRunner,
    absolute_difference,
    relative_difference,
)
from bnconvert.errors import BnconvertError
from bnconvert.probe import untouched
from bnconvert.report import SCHEMA, format_table

_BAR_FROM = -9.0  # decimal exponents between which the bar of a difference grows
_BAR_TO = 0.0
_BAR_WIDTH = 27


@dataclass(frozen=True)
class Difference:
    """How one output, or the output of one layer, differs.

    Attributes:
        name: Name of the output in the first model, or qualified name of the layer.
        shape: Its shape in the first model.
        relative: max|a - b| / max|b|.
        absolute: max|a - b|.
        remark: What explains the difference: another shape, or that the layer's own weights differ.
    """

    name: str
    shape: tuple[int, ...]
    relative: float
    absolute: float
    remark: str = ""


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
        layers: One entry per layer that both have, in the order of execution of the first model;
            empty unless asked for.
        unpaired: Number of layers that only one of both has.
    """

    a: str
    b: str
    inputs: str
    outputs: tuple[Difference, ...]
    top1: float | None
    top5: float | None
    layers: tuple[Difference, ...] = ()
    unpaired: int = 0

    @property
    def largest_difference(self) -> float:
        """The largest relative difference of all outputs."""
        return max(output.relative for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, ready for JSON."""
        plain = asdict(self)
        return {"schema": SCHEMA, "largest_difference": self.largest_difference, **plain}

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b} on {self.inputs}"]
        if self.layers:
            lines += format_table([("layer", "relative", ""), *map(_bar_row, self.layers)])
            lines.append(f"{self.unpaired} layers are in one of both only")
        rows: list[tuple[str, ...]] = [("output", "shape", "relative", "absolute", "")]
        for output in self.outputs:
            shape = "x".join(map(str, output.shape)) or "scalar"
            numbers = f"{output.relative:.1e}", f"{output.absolute:.1e}"
            rows.append((output.name, shape, *numbers, output.remark))
        lines += format_table(rows)
        lines.append(f"largest difference: {self.largest_difference:.1e} relative")
        if self.top1 is not None and self.top5 is not None:
            lines.append(f"agreement: top-1 {self.top1:.1%}, top-5 {self.top5:.1%}")
        return "\n".join(lines)


def _bar_row(layer: Difference) -> tuple[str, ...]:
    exponent = math.log10(layer.relative) if layer.relative > 0 else _BAR_FROM
    share = (min(exponent, _BAR_TO) - _BAR_FROM) / (_BAR_TO - _BAR_FROM)
    bar = "#" * round(max(share, 0.0) * _BAR_WIDTH)
    return layer.name, f"{layer.relative:.1e}", f"{bar} {layer.remark}".strip()


def compare(
    a: nn.Module | str | os.PathLike[str],
    b: nn.Module | str | os.PathLike[str],
    inputs: Any = None,
    *,
    images: str | os.PathLike[str] | None = None,
    layers: bool = False,
) -> Comparison:
    """Run two models on the same inputs and measure how their outputs differ.

    Torch modules are run in eval mode, and left as they were.

    Args:
        a: A torch module or the path of an ONNX file.
        b: Likewise; the reference of relative differences.
        inputs: A tensor, a tuple of positional or a dict of keyword arguments. None takes images,
            or random values of the size that either model states.
        images: A folder of images, prepared as a model's timm configuration or the metadata of a
            file that bnconvert exported says.
        layers: Also compare the outputs of layers, paired by qualified name. An ONNX file must
            have been exported by bnconvert for this, as others do not name their layers.

    Raises:
        BnconvertError: A model does not run, the outputs do not pair up, or there are no inputs.
    """
    if inputs is not None and images is not None:
        raise BnconvertError("compare: both inputs and images are given; pass one of them")
    models = [_module_or_path(model) for model in (a, b)]
    names = [m.name if isinstance(m, Path) else type(m).__name__ for m in models]
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.Module):
                stack.enter_context(untouched(model))
        given = choose_inputs(models, inputs, Path(images) if images is not None else None)
        values, reference = (_run(model, given) for model in models)
        pairs = _layer_pairs(models, given) if layers else _Pairs((), 0)
    if not values and not reference:
        raise BnconvertError(
            f"compare: {names[0]} gives no tensor; compare models that return tensors"
        )
    if len(values) != len(reference):
        raise BnconvertError(
            f"compare: {names[0]} gives {len(values)} outputs, {names[1]} gives "
            f"{len(reference)}; compare models with the same outputs"
        )
    if set(values) == set(reference):  # dictionaries may name them in another order
        reference = {name: reference[name] for name in values}
    both = list(zip(values.items(), reference.values(), strict=True))
    top1, top5 = next((_agreement(x, y) for (_, x), y in both if _has_classes(x, y)), (None, None))
    return Comparison(
        a=names[0],
        b=names[1],
        inputs=given.described,
        outputs=tuple(_difference(name, x, y) for (name, x), y in both),
        top1=top1,
        top5=top5,
        layers=pairs.differences,
        unpaired=pairs.unpaired,
    )


def _module_or_path(model: nn.Module | str | os.PathLike[str]) -> nn.Module | Path:
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise BnconvertError(
            f"compare: expected a module or the path of an ONNX file, got {type(model).__name__}"
        )
    path = Path(model)
    if not path.is_file():
        raise BnconvertError(f"{path}: there is no such file; pass a module or an ONNX file")
    return path


def _run(model: nn.Module | Path, inputs: Inputs) -> dict[str, torch.Tensor]:
    runner = OnnxRunner(model) if isinstance(model, Path) else TorchRunner(model)
    try:
        return runner.run(inputs.of(model))
    except BnconvertError:
        raise
    except Exception as error:
        raise BnconvertError(
            f"{runner.name}: does not run on {inputs.described}: {error}"
        ) from error


@dataclass(frozen=True)
class _Pairs:
    differences: tuple[Difference, ...]
    unpaired: int


def _layer_pairs(models: list[nn.Module | Path], inputs: Inputs) -> _Pairs:
    values, reference = (
        onnx_layers(model, inputs.of(model))
        if isinstance(model, Path)
        else module_layers(model, inputs.of(model))
        for model in models
    )
    paired = [name for name in values if name in reference]
    return _Pairs(
        tuple(
            _difference(name, values[name], reference[name], _remark(name, models))
            for name in paired
        ),
        len(values) + len(reference) - 2 * len(paired),
    )


def _remark(name: str, models: list[nn.Module | Path]) -> str:
    """Say where the weights of a layer differ between two modules: folding moves them."""
    own = []
    for model in models:
        layer = dict(model.named_modules()).get(name) if isinstance(model, nn.Module) else None
        if layer is None:
            return ""
        own.append(dict(layer.named_parameters(recurse=False)))
    same = own[0].keys() == own[1].keys() and all(
        own[0][key].shape == own[1][key].shape and bool((own[0][key] == own[1][key]).all())
        for key in own[0]
    )
    return "" if same else "its weights differ"


def _difference(
    name: str, value: torch.Tensor, reference: torch.Tensor, remark: str = ""
) -> Difference:
    if value.shape != reference.shape:
        remark = f"the other's shape is {'x'.join(map(str, reference.shape)) or 'a scalar'}"
    relative, absolute = (
        relative_difference(value, reference),
        absolute_difference(value, reference),
    )
    return Difference(name, tuple(value.shape), relative, absolute, remark)


def _has_classes(value: torch.Tensor, reference: torch.Tensor) -> bool:
    numbers = value.is_floating_point() and reference.is_floating_point()
    return numbers and value.shape == reference.shape and value.ndim == 2 and value.shape[1] > 1


def _agreement(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the top-1 and top-5 agreement of two (rows, classes) outputs."""
    value, reference = value.double(), reference.double()
    top1 = (value.argmax(1) == reference.argmax(1)).double().mean().item()
    k = min(5, value.shape[1])
    both = value.topk(k).indices.unsqueeze(2) == reference.topk(k).indices.unsqueeze(1)
    return top1, both.any(2).double().mean().item()
