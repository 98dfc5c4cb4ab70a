"""Put normalisation before a model and softmax after it, so that the file holds them too.

Both are hooks on the prepared copy: `torch.export` captures hooks, and the names of layers stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.arguments import Arguments, data_config
from bnconvert.errors import BnconvertError
from bnconvert.images import normalize

if TYPE_CHECKING:
    from collections.abc import Sequence


class Normalize:
    """A hook that normalises the images given to a model, see `bnconvert.images.normalize`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = tuple(mean), tuple(std)

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """Return the normalised images in the dtype of the model."""
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        return (normalize(args[0], self._mean, self._std).to(dtype),)


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
