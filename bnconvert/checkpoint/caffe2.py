"""Names of Caffe2's ResNets, as Detectron's `.pkl` files have them.

`res2_0_branch2a_bn_s` is the scale of the norm after `res2_0_branch2a_w`; statistics were folded
into scale and bias, so that the norm in torch has mean 0 and, for its eps, variance 1 - eps.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from bnconvert.checkpoint.record import Fact, Weights
from bnconvert.checkpoint.tensors import LazyTensor, from_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

EPS = 1e-5
_NORM = re.compile(r"^(.*_bn)_(s|b|rm|riv)$")
_LEAVES = {"s": "weight", "b": "bias", "rm": "running_mean", "riv": "running_var"}
_BRANCHES = {"2a": "conv1", "2b": "conv2", "2c": "conv3", "1": "shortcut"}


def is_caffe2(names: Iterable[str]) -> bool:
    """Return whether the names are Caffe2's: scales and biases of norms, no dots."""
    every = list(names)
    return any(name.endswith("_bn_s") for name in every) and not any("." in n for n in every)


def rename(weights: Weights) -> None:
    """Give the tensors of a Caffe2 file detectron2's names, and its norms their statistics.

    Args:
        weights: Changed in place.
    """
    result: dict[str, LazyTensor] = {}
    momentum = [name for name in weights.tensors if name.endswith("_momentum")]
    for name, tensor in weights.tensors.items():
        if name in momentum or name in ("lr", "model_iter", "weight_order"):
            continue
        match = _NORM.match(name)
        if match:
            result[f"{layer_name(match.group(1))}.{_LEAVES[match.group(2)]}"] = tensor
        else:
            stem, _, leaf = name.rpartition("_")
            leaves = {"w": "weight", "b": "bias"}
            result[f"{layer_name(stem)}.{leaves[leaf]}" if leaf in leaves else name] = tensor
    _add_statistics(result, weights)
    weights.tensors = result
    weights.layout = "Caffe2"
    if momentum:
        weights.notes.append(f"{len(momentum)} momentum blobs of the optimizer were left out")


def _add_statistics(result: dict[str, LazyTensor], weights: Weights) -> None:
    added = 0
    for name in list(result):
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or not layer.endswith("norm"):
            continue
        weights.bn[layer] = {
            "class": Fact("FrozenBatchNorm2d", "Caffe2 scale and bias"),
            "eps": Fact(EPS, "Caffe2 scale and bias"),
        }
        if f"{layer}.running_var" not in result:
            shape = result[name].shape
            result[f"{layer}.running_mean"] = from_tensor(torch.zeros(shape))
            result[f"{layer}.running_var"] = from_tensor(torch.full(shape, 1 - EPS))
            added += 1
    if added:
        weights.notes.append(
            f"{added} norms hold scale and bias only: mean 0 and variance 1 - {EPS:g} were added"
        )


def layer_name(blob: str) -> str:
    """Return detectron2's name for a blob: "res2_0_branch2a_bn" is "res2.0.conv1.norm"."""
    norm = blob.endswith("_bn")
    stem = blob.removesuffix("_bn")
    match = re.fullmatch(r"res(\d)_(\d+)_branch(2a|2b|2c|1)", stem)
    if match:
        name = f"res{match.group(1)}.{match.group(2)}.{_BRANCHES[match.group(3)]}"
    elif stem in ("conv1", "res_conv1"):
        name = "stem.conv1"
    elif stem in ("pred", "fc1000"):
        name = "stem.fc" if stem == "pred" else "linear"
    else:
        name = stem.replace("_", ".")
    return f"{name}.norm" if norm else name
