"""Flax checkpoints in MessagePack: `params` and `batch_stats` as trees of arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import frameworks
from bnconvert.checkpoint.axes import FLIPPED
from bnconvert.checkpoint.msgpack import Extension, unpack
from bnconvert.checkpoint.pickle_values import numpy_dtype
from bnconvert.checkpoint.record import Weights
from bnconvert.checkpoint.registry import Format, Options
from bnconvert.checkpoint.source import Extent, Memory
from bnconvert.checkpoint.tensors import LazyTensor, from_segment
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.checkpoint.probe import Probe

COLLECTIONS = ("params", "batch_stats")
CHUNKED = "__msgpack_chunked_array__"
EMA = ("ema_params", "params_ema", "ema")
NDARRAY = 1
_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def is_flax(found: Probe) -> bool:
    """Return whether a file begins as a MessagePack map whose first key is text."""
    head = found.head
    if found.file is None or len(head) < 4:
        return False
    small = 0x81 <= head[0] <= 0x8F and (0xA1 <= head[1] <= 0xBF or head[1] == 0xD9)
    large = head[0] == 0xDE and (0xA1 <= head[3] <= 0xBF or head[3] == 0xD9)
    return small or large


def read(found: Probe, options: Options) -> Weights:
    """Return the arrays of a Flax checkpoint by layer.

    Raises:
        CheckpointError: It is damaged, or has no parameters.
    """
    tree = unpack(found.source.extent())
    if not isinstance(tree, dict):
        raise CheckpointError(f"{found.path}: is no tree of arrays")
    state, ema = _state(tree, options.weights)
    weights = Weights(layout="Flax")
    if ema:
        weights.notes.append(f"these are the EMA weights ({ema}); the others are in params")
    for collection, branch in state.items():
        if isinstance(branch, dict):
            _walk(branch, (), collection, weights)
    if not weights.tensors:
        raise CheckpointError(f"{found.path}: holds no arrays by name")
    return weights


def _state(tree: dict[Any, Any], wanted: str) -> tuple[dict[Any, Any], str]:
    """Return the collections to read; train states keep the average beside `params`."""
    if isinstance(tree.get("model"), dict) and "params" in tree["model"]:
        tree = tree["model"]
    ema = next((key for key in EMA if isinstance(tree.get(key), dict)), "")
    if wanted == "ema" and not ema:
        raise CheckpointError("holds no EMA weights; ask for raw or auto")
    if not isinstance(tree.get("params"), dict):
        return {"": tree}, ""
    use = ema if ema and wanted != "raw" else ""
    state = {key: tree[key] for key in COLLECTIONS if isinstance(tree.get(key), dict)}
    if use:
        state["params"] = tree[use]
    if isinstance(state["params"].get("params"), dict):
        state = {**state["params"], **{k: v for k, v in state.items() if k != "params"}}
    return state, use


def _walk(branch: dict[Any, Any], path: tuple[str, ...], collection: str, weights: Weights) -> None:
    for key, value in branch.items():
        tensor = _array(value)
        if tensor is not None:
            oriented = _oriented(path, branch, str(key), tensor)
            leaf, tensor = frameworks.leaf_of(str(key), tensor)
            tensor = oriented if oriented.order else tensor
            frameworks.add(weights.tensors, ".".join(path), leaf, tensor)
        elif isinstance(value, dict):
            _walk(value, (*path, str(key)), collection, weights)


def _oriented(
    path: tuple[str, ...], branch: dict[Any, Any], leaf: str, tensor: LazyTensor
) -> LazyTensor:
    """Return a kernel of a transposed convolution with its axes described, others as they are.

    Flax's ConvTranspose has kernels [..., in, out], used as they are, or with `transpose_kernel`
    [..., out, in], used turned around like torch's. The bias tells them apart where in and out
    differ (https://flax.readthedocs.io, ConvTranspose; jax.lax.conv_transpose).

    Raises:
        CheckpointError: Nothing tells which it is.
    """
    if leaf != "kernel" or not path or not path[-1].startswith("ConvTranspose"):
        return tensor
    bias = _array(branch.get("bias"))
    width = bias.shape[0] if bias is not None and len(bias.shape) == 1 else None
    ends = tensor.shape[-2:]
    if len(tensor.shape) < 3 or width not in ends or ends[0] == ends[1]:
        raise CheckpointError(
            f"{'.'.join(path)} is a transposed convolution of shape {list(tensor.shape)}, and "
            f"{'no bias says' if width is None else f'a bias of {width} does not say'} whether it "
            "was made with transpose_kernel; convert that layer by hand"
        )
    return tensor.ordered(FLIPPED if ends[1] == width else "HWOI")


def _array(value: Any) -> LazyTensor | None:
    if isinstance(value, Extension):
        return _ndarray(value)
    if isinstance(value, dict) and CHUNKED in value:
        return _chunked(value)
    return None


def _ndarray(value: Extension) -> LazyTensor | None:
    """Return the array of Flax's extension 1: shape, dtype name and bytes, packed again."""
    if value.kind != NDARRAY:
        return None
    content = unpack(value.data)
    if not isinstance(content, list) or len(content) != 3 or not isinstance(content[0], list):
        raise CheckpointError("an array is described wrongly; the file is damaged")
    shape, name, data = content
    if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 64:
        raise CheckpointError("an array has a shape that is not one; the file is damaged")
    if not isinstance(data, (Memory, Extent)) or not isinstance(name, str):
        raise CheckpointError("an array has no bytes; the file is damaged")
    return from_segment(data, _dtype(name), tuple(shape))


def _dtype(name: str) -> torch.dtype:
    if name in _DTYPES:
        return _DTYPES[name]
    kinds = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bool": "b"}
    kind = name.rstrip("0123456789")
    bits = name.removeprefix(kind)
    if kind not in kinds or (bits and int(bits) % 8):
        raise CheckpointError(f"an array has type {name!r}, which torch has not")
    return numpy_dtype(kinds[kind] + str(int(bits) // 8 if bits else 1))


def _chunked(value: dict[Any, Any]) -> LazyTensor:
    """Return an array that Flax cut because MessagePack holds at most 4 GiB in one value."""
    shape = _numbers(value.get("shape"))
    pieces = value.get("chunks")
    if not isinstance(pieces, dict):
        raise CheckpointError("a chunked array has no chunks; the file is damaged")
    parts = [_array(pieces.get(str(index))) for index in range(len(pieces))]
    tensors = [part for part in parts if part is not None]
    if len(tensors) != len(parts) or not tensors:
        raise CheckpointError("a chunked array misses a chunk; the file is damaged")
    total = sum(math.prod(tensor.shape) for tensor in tensors)
    if total != math.prod(shape) or len({tensor.dtype for tensor in tensors}) != 1:
        raise CheckpointError("a chunked array has other values than its shape needs")

    def load() -> Tensor:
        return torch.cat([tensor.load().reshape(-1) for tensor in tensors]).reshape(shape)

    return LazyTensor(shape, tensors[0].dtype, load)


def _numbers(value: Any) -> tuple[int, ...]:
    values = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise CheckpointError("a chunked array has no shape; the file is damaged")
    return tuple(values)


FORMAT = Format("Flax msgpack", is_flax, read)
