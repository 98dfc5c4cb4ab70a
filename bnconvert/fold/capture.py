"""Capturing the graph of a model on example inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from bnconvert.arguments import Arguments, make_arguments
from bnconvert.capturing import export_program, place
from bnconvert.errors import BnconvertError, first_line
from bnconvert.layers.kinds import Kind, kind_of
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


def refuse_exported(model: nn.Module) -> None:
    """Raise if the model is a captured graph, as `ExportedProgram.module()` returns it.

    Raises:
        BnconvertError: Its BatchNorms are functions and it has no layers.
    """
    kinds = [kind for module in model.modules() if (kind := kind_of(module)) is not None]
    if kinds == [Kind.EXPORTED] and kind_of(model) is Kind.EXPORTED:
        raise BnconvertError(
            "fold: the model is a captured graph, whose BatchNorms are functions and no layers; "
            "give fold_exported the program, torch.export.export(model, example_inputs)"
        )


def refuse_training_mode(model: nn.Module) -> None:
    """Raise if any module is in training mode, naming the first ones.

    Raises:
        BnconvertError: A module is in training mode.
    """
    training = [name or "the model" for name, module in model.named_modules() if module.training]
    if training:
        more = f" and {len(training) - _NAMED} more" if len(training) > _NAMED else ""
        raise BnconvertError(
            f"fold: {', '.join(training[:_NAMED])}{more}: in training mode, which folding is "
            "not for; call model.eval() first"
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


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes such as `_parameters` and `_forward_hooks`."""

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


@dataclass(frozen=True)
class Captured:
    """A captured forward.

    Attributes:
        program: The program. Behind the outputs of the forward it returns what `stored` names.
        stored: Names of the attributes in which the forward stores tensors, such as
            "encoder.features[0]".
    """

    program: ExportedProgram
    stored: tuple[str, ...]


def capture(model: nn.Module, arguments: Arguments) -> Captured:
    """Return the captured forward of a model, with the tensors that it stores in attributes.

    Raises:
        BnconvertError: The forward cannot be captured as a graph; the text says where.
    """
    before: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    depth = 0  # a forward may call its own model

    def start(module: nn.Module, _args: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            before.update(attribute_tensors(module))

    def finish(module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal depth
        depth -= 1
        if depth:
            return output
        known = set(map(id, before.values()))
        stored.clear()
        after = attribute_tensors(module)
        stored.update((n, tensor) for n, tensor in after.items() if id(tensor) not in known)
        return (output, list(stored.values())) if stored else output

    handles = [model.register_forward_pre_hook(start), model.register_forward_hook(finish)]
    try:
        program = export_program(model, arguments)
    except Exception as error:
        raise BnconvertError(
            f"fold: the model's forward cannot be captured as a graph{place(error)}: "
            f"{first_line(error).rstrip('.')}; torch.export must be able to follow it, so without "
            "control flow that depends on data"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return Captured(program, tuple(stored))


def attribute_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that modules hold beside parameters and buffers, by name.

    Looks into lists, tuples and dicts.
    """
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        own = {name: held for name, held in vars(module).items() if name not in _OF_EVERY_MODULE}
        for path, leaf in pytree.tree_flatten_with_path(own)[0]:
            if isinstance(leaf, Tensor):
                attribute: Any = path[0]
                name = f"{attribute.key}{pytree.keystr(path[1:])}"
                found[f"{prefix}.{name}" if prefix else name] = leaf
    return found
