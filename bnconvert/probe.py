"""Running a model once to see what its layers are given, without leaving a trace in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnconvert.errors import BnconvertError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator


def as_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that `example_inputs` stands for.

    Args:
        example_inputs: A tensor, a tuple of positional or a dict of keyword arguments.

    Raises:
        BnconvertError: It is something else.
    """
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, dict) and all(isinstance(key, str) for key in example_inputs):
        return (), dict(example_inputs)
    raise BnconvertError(
        "example_inputs: expected a tensor, a tuple of positional or a dict of keyword arguments, "
        f"got {type(example_inputs).__name__}"
    )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run the body with the model in eval mode and without gradients; restore all that it changes.

    Training flags are set directly, as a module may override `train`; buffers are put back where
    the run wrote to them; the random state of the CPU is kept.
    """
    modules = list(model.modules())
    flags = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        with torch.random.fork_rng(devices=[]), buffers_kept(model):
            yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Run the body without gradients, and put the buffers back where it wrote to them."""
    saved = [(b, _version(b), b.clone()) for b in model.buffers() if b.device.type != "meta"]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, version, value in saved:
                if version is None or _version(buffer) != version:
                    buffer.copy_(value)


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version


def input_dims(
    model: nn.Module, layers: list[nn.Module], example_inputs: Any
) -> dict[int, set[int]]:
    """Return, by `id` of each layer, the numbers of dimensions of the inputs it was called with.

    Raises:
        BnconvertError: The model does not run on the example.
    """
    args, kwargs = as_arguments(example_inputs)
    seen: dict[int, set[int]] = {id(layer): set() for layer in layers}

    def record(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen[id(layer)].add(inputs[0].dim())

    handles = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        with untouched(model):
            model(*args, **kwargs)
    except Exception as error:
        raise BnconvertError(
            f"example_inputs: the model does not run on them ({type(error).__name__}: "
            f"{first_line(error)}); give inputs as its forward takes them"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return seen
