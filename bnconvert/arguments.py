"""The arguments a model is called with: normalised, resized to other batches, cast, flattened.

`example_inputs` is given as a tensor, a tuple of positional or a dict of keyword arguments; every
pass that runs a model turns it into `Arguments` first.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bnconvert.errors import BnconvertError
from bnconvert.probe import as_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

_IMAGE_DIMS = 4


@dataclass(frozen=True)
class Arguments:
    """Positional and keyword arguments of one call.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in the order in which `torch.export` flattens the arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def fixed(self) -> dict[str, Any]:
        """What is no tensor and not None, by its place in the call: `0` or `scale`."""
        leaves, _ = pytree.tree_flatten_with_path((self.args, self.kwargs))
        return {
            "_".join(_keys(path[1:])): leaf  # the first key tells args from kwargs
            for path, leaf in leaves
            if leaf is not None and not isinstance(leaf, torch.Tensor)
        }

    @property
    def batch(self) -> int | None:
        """Size of the first dimension of the first tensor that has dimensions."""
        return next((t.shape[0] for t in self.tensors if t.ndim), None)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        """Return the arguments with every tensor replaced by `fn(tensor)`."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, fn, (self.args, self.kwargs))
        return Arguments(args, kwargs)

    def to(self, dtype: torch.dtype) -> Arguments:
        """Return the arguments with floating point tensors cast; others are kept."""
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def with_batch(self, batch: int, seed: int = 0) -> Arguments:
        """Return arguments of another batch size, the rows of the example first.

        Every tensor whose first dimension equals `self.batch` is a batch. New rows are random, so
        that no row equals another: repeated rows would hide a model that mixes up its samples.
        """
        own, generator = self.batch, torch.Generator().manual_seed(seed)

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.ndim or tensor.shape[0] != own or batch == own:
                return tensor
            if batch < own:
                return tensor[:batch]
            shape = (batch - own, *tensor.shape[1:])
            return torch.cat([tensor, _values_like(tensor, shape, generator)])

        return self.map(resize)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the first image batch; None without one."""
        return next((_height_width(t) for t in self.tensors if t.ndim == _IMAGE_DIMS), None)

    def with_larger_images(self, height: int, width: int, seed: int = 0) -> Arguments:
        """Return random arguments whose images are this much higher and wider."""
        generator = torch.Generator().manual_seed(seed)

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim != _IMAGE_DIMS:
                return tensor
            shape, axes = list(tensor.shape), image_axes(tensor)
            for axis, more in zip(axes, (height, width), strict=True):
                shape[axis] += more
            return _values_like(tensor, tuple(shape), generator)

        return self.map(resize)


def image_axes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the axes of height and width of a batch of images: uint8 ones have channels last."""
    return (1, 2) if tensor.dtype is torch.uint8 else (2, 3)


def _height_width(tensor: torch.Tensor) -> tuple[int, int]:
    height, width = image_axes(tensor)
    return tensor.shape[height], tensor.shape[width]


def _values_like(
    tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Return values that the model accepts in place of the tensor's own.

    Floating point values have the tensor's mean and deviation; others are drawn from its values,
    because they may be indices that have a range.
    """
    if tensor.is_floating_point() or not tensor.numel():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        deviation = tensor.double().std(correction=0).nan_to_num() if tensor.numel() else 0.0
        center = tensor.double().mean() if tensor.numel() else 0.0
        return (noise * (deviation or 1.0) + center).to(tensor.dtype)
    pick = torch.randint(tensor.numel(), shape, generator=generator)
    return tensor.flatten()[pick]


def make_arguments(model: nn.Module, example_inputs: Any) -> Arguments:
    """Return the arguments that `example_inputs` stands for, on the CPU.

    Args:
        model: The model that will be called; asked for its timm input size when there is no
            example.
        example_inputs: A tensor, a tuple or list of positional arguments, a dict of keyword
            arguments, or None for two random images of the model's own input size.

    Raises:
        BnconvertError: The value is of another kind, or there is neither an example nor a size.
    """
    if example_inputs is None:
        return Arguments((random_images(input_size(model), 2),), {})
    arguments = Arguments(*as_arguments(example_inputs))
    if not arguments.tensors:
        raise BnconvertError("example_inputs: holds no tensor; pass what the model is called with")
    if not any(tensor.numel() for tensor in arguments.tensors):
        raise BnconvertError("example_inputs: holds no values; pass a batch of at least one")
    return arguments.map(lambda tensor: tensor.detach().cpu())


def input_size(model: nn.Module) -> tuple[int, ...]:
    """Return channels, height and width of the images that a timm model takes.

    Raises:
        BnconvertError: The model has no timm configuration.
    """
    return tuple(data_config(model)["input_size"])


def data_config(model: nn.Module) -> dict[str, Any]:
    """Return timm's data configuration of a model: input size, mean, std, crop, interpolation.

    Raises:
        BnconvertError: The model has no timm configuration.
    """
    if not getattr(model, "pretrained_cfg", None) and not getattr(model, "default_cfg", None):
        raise BnconvertError(
            f"example_inputs: {type(model).__name__} has no timm configuration that gives its "
            "input size; pass example inputs (--input-size)"
        )
    from timm.data import resolve_model_data_config

    config: dict[str, Any] = resolve_model_data_config(model)
    return config


def random_images(size: tuple[int, ...], batch: int, seed: int = 0) -> torch.Tensor:
    """Return normal random images, (batch, *size)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((batch, *size), generator=generator)


def output_names(output: Any) -> list[str]:
    """Return a name for each tensor of a model's output, in flattened order.

    A single tensor is `output`, members of a tuple are `output_0`, `output_1`, entries of a dict
    have their key, and nested ones join both with an underscore.
    """
    leaves, _ = pytree.tree_flatten_with_path(output)
    return _unique([_path_name(path) for path, leaf in leaves if isinstance(leaf, torch.Tensor)])


def other_outputs(output: Any) -> dict[str, Any]:
    """Return what is not a tensor in a model's output, by names made in the same way."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    others = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, torch.Tensor)]
    names = _unique([_path_name(path) for path, _ in others])
    return dict(zip(names, (leaf for _, leaf in others), strict=True))


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in flattened order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _keys(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]


def _path_name(path: tuple[Any, ...]) -> str:
    parts = _keys(path)
    return "_".join(parts if parts and not parts[0].isdigit() else ["output", *parts])


def _unique(names: list[str]) -> list[str]:
    unique: dict[str, None] = {}
    for name in names:
        choices = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
        unique[next(choice for choice in choices if choice not in unique)] = None
    return list(unique)
