"""What the file has before and after the model: normalisation, softmax, tensors only.

All are hooks on the prepared copy: `torch.export` captures hooks, and the names of layers stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.arguments import (
    Arguments,
    data_config,
    other_outputs,
    output_names,
    output_tensors,
)
from bnconvert.comparison.images import normalize
from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Normalize:
    """A hook that normalises the images given to a model, by `bnconvert.comparison.images`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = tuple(mean), tuple(std)

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """Return the normalised images in the dtype of the model."""
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        return (normalize(args[0], self._mean, self._std).to(dtype),)


class TensorsOnly:
    """A hook that takes everything but tensors out of a model's output, which ONNX cannot give.

    Attributes:
        left_out: Type by name of the outputs that the last run left out.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the tensors by name where there is something else, else None."""
        self.left_out = {n: type(value).__name__ for n, value in other_outputs(output).items()}
        if not self.left_out:
            return None
        return dict(zip(output_names(output), output_tensors(output), strict=True))

    @property
    def notes(self) -> list[str]:
        """A sentence for each output left out."""
        return [
            f"{name} is not in the file: it is of type {kind}, not a tensor"
            for name, kind in self.left_out.items()
        ]


def _softmax(_module: nn.Module, _args: Any, output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise BnconvertError(
            f"softmax: the model returns a {type(output).__name__}, not one tensor of scores; "
            "export it without softmax"
        )
    return output.softmax(-1)


def add_softmax(model: nn.Module) -> None:
    """Make a model return probabilities along its last axis."""
    model.register_forward_hook(_softmax)


def add_preprocess(model: nn.Module, arguments: Arguments) -> Arguments:
    """Make a timm model take uint8 images; return example arguments of that kind.

    Raises:
        BnconvertError: The model has no timm configuration, or takes something other than one
            batch of RGB images.
    """
    config = data_config(model)
    shapes = [tuple(tensor.shape) for tensor in arguments.tensors]
    if len(shapes) != 1 or len(shapes[0]) != 4 or shapes[0][1] != 3 or arguments.kwargs:
        raise BnconvertError(
            f"preprocess: the model takes tensors of shape {shapes}, not one batch of RGB images; "
            "export it without preprocess"
        )
    batch, channels, height, width = shapes[0]
    model.register_forward_pre_hook(Normalize(config["mean"], config["std"]), prepend=True)
    generator = torch.Generator().manual_seed(0)
    size = (batch, height, width, channels)
    return Arguments((torch.randint(256, size, generator=generator, dtype=torch.uint8),), {})
