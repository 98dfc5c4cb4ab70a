"""What a file says about itself, in its `metadata_props`: text by key, structures as JSON.

The keys are listed in docs/onnx.md. A program that serves the file needs nothing else.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bnconvert import __version__
from bnconvert.arguments import data_config
from bnconvert.models import WEIGHTS

if TYPE_CHECKING:
    from torch import nn

_DATA_KEYS = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")


def describe(model: nn.Module, *, preprocess: bool, softmax: bool) -> dict[str, str]:
    """Return the entries for a model.

    Args:
        model: What is exported; timm's configuration of it is used where it has one.
        preprocess: The file normalises its input itself.
        softmax: The file's output is probabilities.
    """
    entries: dict[str, Any] = {
        "bnconvert_version": __version__,
        "torch_version": torch.__version__,
        "input_layout": "NHWC uint8" if preprocess else "NCHW float32",
        "output": "probabilities" if softmax else "as the model gives it",
    }
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if config:
        entries |= _timm_entries(model, config)
    else:
        entries["architecture"] = type(model).__name__
        del entries["input_layout"]
    return {key: _text(value) for key, value in sorted(entries.items())}


def checkpoint_entries(spec: str, checkpoint: str | None) -> dict[str, str]:
    """Return the entry that identifies the weights of a MODEL: the SHA-256 of their file.

    Args:
        spec: A MODEL specification; a folder's own weights count when there is no checkpoint.
        checkpoint: The file of weights that was loaded into it, or None.
    """
    path = Path(checkpoint) if checkpoint else Path(spec.removeprefix("local-dir:")) / WEIGHTS
    if not path.is_file():
        return {}
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"checkpoint_sha256": digest.hexdigest()}


def _timm_entries(model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    import timm

    data = data_config(model)
    entries = {key: data[key] for key in _DATA_KEYS if key in data}
    entries |= {
        "architecture": config.get("architecture") or type(model).__name__,
        "color_order": "RGB",
        "timm_version": timm.__version__,
    }
    labels = _labels(model, config)
    return entries | ({"class_names": labels} if labels else {})


def _labels(model: nn.Module, config: dict[str, Any]) -> list[str]:
    """Return the class names in the order of the output, or nothing where they are not known."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if config.get("label_names"):
        return [str(name) for name in config["label_names"]]
    subset = infer_imagenet_subset(model)
    return list(ImageNetInfo(subset).label_descriptions()) if subset else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
