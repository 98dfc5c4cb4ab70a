"""Running a model once to see what its layers are given, without leaving a trace in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnconvert.errors import BnconvertError, first_line
from bnconvert.forwarding import input_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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

    The random state of the CPU is kept, too.
    """
    with in_eval_mode(model), torch.random.fork_rng(devices=[]), buffers_kept(model):
        yield


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run the body with every module in eval mode, and restore the flags.

    They are set one by one: a `train` method that does more (merging branches, say) would change
    the model.
    """
    modules = list(model.modules())
    flags = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


@contextlib.contextmanager
def buffers_kept(model: nn.Module, besides: Iterable[Tensor] = ()) -> Iterator[None]:
    """Run the body without gradients, and put the buffers back where it wrote to them.

    Args:
        model: The model; some modules write to buffers in eval mode too, as the observers of
            quantization-aware training do.
        besides: Buffers that keep what the body writes.
    """
    free = {id(buffer) for buffer in besides}
    saved = [
        (module, name, buffer, _version(buffer), buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and id(buffer) not in free
    ]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, version, value in saved:
                module._buffers[name] = buffer
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)
                if _version(buffer) != version or _differs(buffer, value):
                    buffer.copy_(value)


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version


def _differs(tensor: Tensor, value: Tensor) -> bool:
    """Return whether a tensor was written to without being counted, as fused observers do."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return plain and not torch.equal(tensor, value)


def input_dims(
    model: nn.Module, layers: list[nn.Module], example_inputs: Any
) -> dict[int, set[int]]:
    """Return, by `id` of each layer, the numbers of dimensions of the inputs it was called with.

    Raises:
        BnconvertError: The model does not run on the example.
    """
    args, kwargs = as_arguments(example_inputs)
    seen: dict[int, set[int]] = {id(layer): set() for layer in layers}

    def record(layer: nn.Module, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        seen[id(layer)].add(input_of(inputs, by_name).dim())

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
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
