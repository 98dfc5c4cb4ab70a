"""Calling a model on the batches of a data loader, with hooks on its layers that are seen."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bnconvert.errors import BnconvertError, first_line

if TYPE_CHECKING:
    from torch import Tensor


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel and `torch.compile`.

    The forward of DistributedDataParallel sends buffers between ranks, which hangs when ranks have
    different numbers of batches; the compiled forward does not see hooks that were added later.
    """
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(original := getattr(model, "_orig_mod", None), nn.Module):
            model = original
        else:
            return model


def is_sharded(model: nn.Module) -> bool:
    """Whether parts of the model gather their parameters from other ranks in every forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    return any(isinstance(module, kinds) for module in model.modules())


def without_compilation(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which parts of the model that were compiled in place run eagerly."""
    compiled = any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch that is a tensor, or whose first item is one.

    Raises:
        BnconvertError: The batch is something else, or the model does not run on it.
    """
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(first, torch.Tensor):
        raise BnconvertError(
            f"loader: a batch is a {type(batch).__name__} that does not start with a tensor; "
            "pass forward=lambda model, batch: model(...)"
        )
    try:
        return model(first)
    except BnconvertError:
        raise
    except Exception as error:
        raise BnconvertError(
            f"model: does not run on a batch of shape {tuple(first.shape)} and {first.dtype} "
            f"({type(error).__name__}: {first_line(error)}); give batches that fit, or pass "
            "forward=lambda model, batch: model(...)"
        ) from error


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all tensors, however nested, on the device."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch
    )


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor that a layer was called with, by position or by name."""
    tensor: Tensor = args[0] if args else next(iter(kwargs.values()))
    return tensor
