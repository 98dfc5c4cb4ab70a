"""Capture a prepared model as a `torch.export` program with the dynamic dimensions asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from bnconvert.arguments import image_axes
from bnconvert.capturing import export_program, place
from bnconvert.errors import BnconvertError, first_line

if TYPE_CHECKING:
    from bnconvert.arguments import Arguments

_IMAGE_DIMS = 4
_TRAINING_ARGUMENT = 5  # of aten::batch_norm(input, weight, bias, mean, var, training, ...)


def capture(
    model: nn.Module, arguments: Arguments, *, dynamic_batch: bool, dynamic_size: bool
) -> ExportedProgram:
    """Return the program of a model in eval mode.

    Args:
        model: The prepared copy.
        arguments: Example arguments; with `dynamic_batch` at least two rows, because torch takes
            a size of one for a constant.
        dynamic_batch: Leave the first dimension of every batch tensor open.
        dynamic_size: Leave height and width of every four-dimensional tensor open.

    Raises:
        BnconvertError: The capture fails, or a BatchNorm normalises with the batch's statistics.
    """
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]  # of torch
    batch = arguments.batch
    for tensor in arguments.tensors:
        dims = {}
        if dynamic_batch and tensor.ndim and tensor.shape[0] == batch:
            dims[0] = Dim.DYNAMIC
        if dynamic_size and tensor.ndim == _IMAGE_DIMS:
            dims |= dict.fromkeys(image_axes(tensor), Dim.DYNAMIC)
        if dims:
            shapes[tensor] = dims
    try:
        spec = shapes.dynamic_shapes(  # type: ignore[no-untyped-call]  # of torch
            model, arguments.args, arguments.kwargs
        )
        program = export_program(model, arguments, spec)
    except Exception as error:
        raise BnconvertError(_why(error, dynamic_batch, dynamic_size)) from error
    _refuse_batch_statistics(program)
    return program


def _why(error: Exception, dynamic_batch: bool, dynamic_size: bool) -> str:
    text = first_line(error).rstrip(".")
    if "data-dependent" in text:
        return (
            f"capture: what the model does depends on the values of its inputs{place(error)}; "
            "use torch.where or torch.cond there, or export the part before it"
        )
    if "onstraint" in str(error) and (dynamic_batch or dynamic_size):
        option = "dynamic_size" if dynamic_size else "dynamic_batch"
        return f"capture: the model fixes a dimension that shall stay open; pass {option}=False"
    return (
        f"capture: torch.export fails{place(error)}: {text}; it must be able to follow the "
        "model's forward, without NumPy and control flow that depends on data"
    )


def layer_of(node: torch.fx.Node) -> str:
    """Return the qualified name of the module in whose forward a node was made."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((name for name, _ in reversed(stack.values())), "")


def _refuse_batch_statistics(program: ExportedProgram) -> None:
    given = set(program.graph_signature.user_inputs)
    names = []
    for node in program.graph.nodes:  # what depends on the inputs, in order of execution
        if given.isdisjoint(source.name for source in node.all_input_nodes):
            continue
        given.add(node.name)
        if node.target is torch.ops.aten.batch_norm.default and node.args[_TRAINING_ARGUMENT]:
            names.append(layer_of(node) or node.name)
    if names:
        raise BnconvertError(
            f"{', '.join(dict.fromkeys(names))}: normalises with the statistics of each batch, "
            "even in eval mode; give it running statistics (track_running_stats=True) first"
        )
