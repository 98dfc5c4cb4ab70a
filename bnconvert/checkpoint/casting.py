"""Changing the dtype of stored tensors, refusing what the new one cannot hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bnconvert.checkpoint.tensors import LazyTensor, dtype_name
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_BLOCK = 1 << 22


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a name such as "fp16"; raises `CheckpointError` for any other."""
    if name is None or name in DTYPES.values():
        return name  # type: ignore[return-value]  # one of the three dtypes, or None
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not offered; choose fp16, bf16 or fp32")
    return DTYPES[str(name)]


def cast(name: str, tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return the tensor in another floating dtype; integers and booleans stay as they are.

    Reading the result raises `CheckpointError` where a finite value is beyond the range of the
    new dtype, or is not a number that it can hold.

    Args:
        name: For the message.
        tensor: The stored tensor.
        dtype: The new floating dtype.

    Raises:
        CheckpointError: The tensor is complex.
    """
    if tensor.dtype is dtype or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return tensor
    if tensor.dtype.is_complex:
        raise CheckpointError(f"{name}: is complex, which {dtype_name(dtype)} cannot hold")

    def load() -> Tensor:
        values = tensor.load()
        result = torch.empty(values.shape, dtype=dtype)
        source, target = values.reshape(-1), result.reshape(-1)
        for start in range(0, source.numel(), _BLOCK):
            part = slice(start, start + _BLOCK)
            target[part] = source[part].to(dtype)
            lost = target[part].float().isinf() & ~source[part].to(torch.float64).isinf()
            if lost.any():
                worst = float(source[part][lost].double().abs().max())
                raise CheckpointError(
                    f"{name}: holds {worst:g}, which is beyond {dtype_name(dtype)}; keep its dtype"
                )
        return result

    return replace(tensor, dtype=dtype, load=load, extent=None)
