"""What two models are compared on: given inputs, photos, or random values of their own size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import nn

from bnconvert.arguments import Arguments, data_config, make_arguments, random_images
from bnconvert.comparison.images import load_images, normalize
from bnconvert.errors import BnconvertError, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

Model = nn.Module | Path
_DATA_KEYS = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")


@dataclass(frozen=True)
class Inputs:
    """What both models are run on.

    Attributes:
        described: In words.
        arguments: For a model that takes floating point values.
        raw: The same images for a file that normalises them itself; None where there are none.
    """

    described: str
    arguments: Arguments
    raw: Arguments | None = None

    def of(self, model: Model) -> Arguments:
        """Return the arguments for one of the models."""
        if self.raw is not None and isinstance(model, Path) and takes_raw_images(model):
            return self.raw
        return self.arguments


def choose_inputs(models: Sequence[Model], inputs: Any, images: Path | None) -> Inputs:
    """Return what to run the models on.

    Args:
        models: Modules and paths of ONNX files.
        inputs: What the caller gave, or None.
        images: A folder of images, or None.

    Raises:
        BnconvertError: No model says what it takes, or the inputs are of no known kind.
    """
    if inputs is not None:
        return Inputs("the given inputs", make_arguments(nn.Identity(), inputs))
    config = _config(models)
    if config is not None:
        config["input_size"] = _input_size(config, models)
    if images is not None:
        if config is None:
            raise BnconvertError(
                "images: neither model says how to prepare images; compare with a timm model"
            )
        return _images(load_images(images, config), config, "image")
    batch = _fixed_sizes(models)[0] or 2
    if any(isinstance(model, Path) and takes_raw_images(model) for model in models):
        if config is None:
            raise BnconvertError(
                "inputs: neither model says how images are normalised; pass inputs"
            )
        channels, height, width = config["input_size"]
        generator = torch.Generator().manual_seed(0)
        size = (batch, height, width, channels)
        raw = torch.randint(256, size, generator=generator, dtype=torch.uint8)
        return _images(raw, config, "random image")
    modules = [model for model in models if isinstance(model, nn.Module)]
    files = [model for model in models if isinstance(model, Path)]
    if config is None and files:
        return Inputs("random values", _random_values(files[0]))
    if config is None:
        return Inputs("2 random images", make_arguments(modules[0], None))
    random = random_images(tuple(config["input_size"]), batch)
    return Inputs(_counted(batch, "random image"), Arguments((random,), {}))


def _images(raw: torch.Tensor, config: dict[str, Any], what: str) -> Inputs:
    normalized = normalize(raw, config["mean"], config["std"])
    return Inputs(_counted(len(raw), what), Arguments((normalized,), {}), Arguments((raw,), {}))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _config(models: Sequence[Model]) -> dict[str, Any] | None:
    """Return the data configuration of the first model that has one."""
    for model in models:
        if isinstance(model, Path):
            metadata = read_metadata(model)
            known = {"input_size", "mean", "std"} <= metadata.keys()
            if known and _is_size(metadata["input_size"]):
                return {key: metadata[key] for key in _DATA_KEYS if key in metadata}
        elif getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None):
            return data_config(model)
    return None


def _input_size(config: dict[str, Any], models: Sequence[Model]) -> tuple[int, ...]:
    """Return channels, height and width: those that a file has fixed, else the configuration's."""
    fixed = _fixed_sizes(models)[1:]
    return tuple(own or size for own, size in zip(fixed, config["input_size"], strict=True))


def _fixed_sizes(models: Sequence[Model]) -> tuple[int, int, int, int]:
    """Return batch, channels, height and width of a file's images; 0 where they are open."""
    for path in (model for model in models if isinstance(model, Path)):
        sizes = [
            [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
            for entry in _load(path).graph.input
        ]
        images = [size for size in sizes if len(size) == 4]
        if images:
            batch, *image = images[0]
            channels, height, width = image if not takes_raw_images(path) else image[2:] + image[:2]
            return batch, channels, height, width
    return 0, 0, 0, 0


def _is_size(value: Any) -> bool:
    sizes = value if isinstance(value, list) else []
    return len(sizes) == 3 and all(isinstance(size, int) and size > 0 for size in sizes)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of an ONNX file, JSON texts decoded."""
    return {entry.key: _decoded(entry.value) for entry in _load(path).metadata_props}


def takes_raw_images(path: Path) -> bool:
    """Whether a file takes uint8 images and normalises them itself."""
    entries = _load(path).graph.input
    return len(entries) == 1 and entries[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8


def _load(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError has no public name
        raise BnconvertError(f"{path}: is not an ONNX file: {first_line(error)}") from error


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _random_values(path: Path) -> Arguments:
    """Return random values for each input of a file, two rows where the batch is open."""
    values = {}
    graph = _load(path).graph
    constants = {tensor.name for tensor in graph.initializer}
    for seed, entry in enumerate(e for e in graph.input if e.name not in constants):
        dims = entry.type.tensor_type.shape.dim
        shape = [d.dim_value or (2 if axis == 0 else 0) for axis, d in enumerate(dims)]
        if entry.type.tensor_type.elem_type != onnx.TensorProto.FLOAT or not all(shape):
            raise BnconvertError(
                f"{path}: its input {entry.name} does not have one float32 shape; pass inputs"
            )
        values[entry.name] = random_images(tuple(shape[1:]), shape[0], seed)
    return Arguments((), values)
