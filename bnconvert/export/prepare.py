"""The copy of a model that is exported: in eval mode, on the CPU, in float32."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from bnconvert.errors import BnconvertError, first_line
from bnconvert.forwarding import unwrap


@dataclass(frozen=True)
class Prepared:
    """A model ready to be captured.

    Attributes:
        model: A copy in eval mode, on the CPU, floating point values in float32.
        notes: What was changed on the way, a sentence each.
    """

    model: nn.Module
    notes: tuple[str, ...]


def prepare(model: nn.Module) -> Prepared:
    """Copy a model for export; the one given is not changed.

    Raises:
        BnconvertError: It is not a module, cannot be copied, or has no values.
    """
    if not isinstance(model, nn.Module):
        raise BnconvertError(
            f"model: is a {type(model).__name__}; pass a torch.nn.Module "
            "(bnconvert.load_model makes one from a name or folder)"
        )
    inner = unwrap(model)
    _refuse_unfit(inner)
    try:
        with torch.no_grad():  # or the weights of scripted parts are computed from the originals
            own = copy.deepcopy(inner, _computed(inner))
    except Exception as error:
        raise BnconvertError(
            f"model: {type(inner).__name__} cannot be copied ({first_line(error)}); remove what "
            "deepcopy refuses first"
        ) from error
    notes = _mode_note(own)
    own.eval()
    notes += _dtype_note(own)
    return Prepared(own.cpu().float().requires_grad_(False), tuple(notes))


def _computed(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return copies of computed tensors, which deepcopy refuses, by the identity of each.

    The hooks of `torch.nn.utils.weight_norm` leave the weight that they computed in the module.
    """
    held = (value for module in model.modules() for value in vars(module).values())
    return {
        id(value): value.detach().clone()
        for value in held
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }


def _refuse_unfit(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise BnconvertError(
            f"model: {type(model).__name__} is a script; export the module it was made from"
        )
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise BnconvertError(f"{name}: has no shape yet; run the model once before export")
        if tensor.is_meta:
            raise BnconvertError(f"{name}: is on the meta device; load weights before export")


def _mode_note(model: nn.Module) -> list[str]:
    count = sum(module.training for module in model.modules())
    return [f"{count} modules were in training mode; exported in eval mode"] if count else []


def _dtype_note(model: nn.Module) -> list[str]:
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = {t.dtype for t in tensors if t.is_floating_point()} - {torch.float32}
    notes = []
    for dtype in sorted(map(str, dtypes)):
        how = "rounded to" if dtype == "torch.float64" else "exactly as"
        notes.append(f"weights in {dtype.removeprefix('torch.')} are stored {how} float32")
    return notes
