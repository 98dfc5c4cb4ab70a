"""Capturing the graph of a model on example inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from bnconvert.arguments import Arguments, make_arguments
from bnconvert.capturing import export_program, place
from bnconvert.errors import BnconvertError, first_line
from bnconvert.probe import untouched

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_NAMED = 3
"""Modules that an error lists by name."""


def arguments_for(model: nn.Module, example_inputs: Any) -> Arguments:
    """Return the example inputs as arguments, on the device of the model.

    Raises:
        BnconvertError: They are no tensors, tuples or dicts of tensors.
    """
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    return make_arguments(model, example_inputs).map(lambda tensor: tensor.to(device))


def refuse_training_mode(model: nn.Module) -> None:
    """Raise if any module is in training mode, naming the first ones.

    Raises:
        BnconvertError: A module is in training mode.
    """
    training = [name or "the model" for name, module in model.named_modules() if module.training]
    if training:
        more = f" and {len(training) - _NAMED} more" if len(training) > _NAMED else ""
        raise BnconvertError(
            f"fold: {', '.join(training[:_NAMED])}{more}: in training mode, where BatchNorm "
            "normalises by the batch; call model.eval() first"
        )


def refuse_uninitialized(model: nn.Module) -> None:
    """Raise if a weight has no value yet, or none that can be changed.

    Raises:
        BnconvertError: A parameter or buffer is not initialized, on the meta device, or made in
            inference mode.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise BnconvertError(
                f"fold: {name} is not initialized; run the model once before folding it"
            )
        if tensor.is_inference():
            raise BnconvertError(
                f"fold: {name} was made in torch.inference_mode, where weights cannot be changed "
                "later; build the model outside it"
            )
        if tensor.is_meta:
            raise BnconvertError(f"fold: {name} is on the meta device; load weights before folding")


_FIT = "; pass inputs that it accepts"


def run(model: nn.Module, arguments: Arguments, advice: str = _FIT) -> Any:
    """Run a model without gradients.

    Args:
        model: The model.
        arguments: What to call it with.
        advice: End of the error's text.

    Raises:
        BnconvertError: The model does not run on these inputs.
    """
    own = arguments.map(torch.clone)  # a forward may write into its input, and into buffers
    with untouched(model):
        try:
            return pytree.tree_map_only(Tensor, torch.clone, model(*own.args, **own.kwargs))
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in arguments.tensors)
            raise BnconvertError(
                f"fold: the model does not run on example_inputs of shape {shapes}: "
                f"{first_line(error).rstrip('.')}{advice}"
            ) from error


def capture(model: nn.Module, arguments: Arguments) -> ExportedProgram:
    """Return the exported program of a model's forward.

    Raises:
        BnconvertError: The forward cannot be captured as a graph; the text says where.
    """
    try:
        return export_program(model, arguments)
    except Exception as error:
        raise BnconvertError(
            f"fold: the model's forward cannot be captured as a graph{place(error)}: "
            f"{first_line(error).rstrip('.')}; torch.export must be able to follow it, so without "
            "control flow that depends on data"
        ) from error
