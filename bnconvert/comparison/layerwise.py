"""What every layer of a model gives, by qualified name, from torch modules and ONNX files alike.

In a file that bnconvert exported, each node has the name of its layer, `layer1.0.conv1/Conv`. The
output of a layer is the last value that a node of it, or of its children, gives. A BatchNorm that
was folded gives what the operation that took it up gives; the file lists these under `folded`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import nn
from torch.utils import _pytree as pytree

from bnconvert.arguments import output_tensors
from bnconvert.comparison.runners import OnnxRunner, RuntimeLevel
from bnconvert.probe import buffers_kept

if TYPE_CHECKING:
    from bnconvert.arguments import Arguments

FOLDED_KEY = "folded"
"""Metadata: JSON object from the name of a folded BatchNorm to the layer that gives its output."""

MOVED_KEY = "moved"
"""Metadata: JSON list of layers whose own output is no value of the file any more."""


def module_layers(model: nn.Module, arguments: Arguments) -> dict[str, torch.Tensor]:
    """Return the output of every module that returns one tensor, in the order of execution.

    A module that is called several times has the suffixes `#1`, `#2`, ... from its second call on.
    """
    values: dict[str, torch.Tensor] = {}
    names = {module: name for name, module in model.named_modules()}

    def record(module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            calls = sum(key.partition("#")[0] == names[module] for key in values)
            values[f"{names[module]}#{calls}" if calls else names[module]] = output.detach().clone()

    handles = [module.register_forward_hook(record) for module in names if names[module]]
    own = arguments.map(torch.clone)  # a forward may write into its input
    try:
        with buffers_kept(model):
            output = model(*own.args, **own.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return values | dict(zip(_output_keys(output), output_tensors(output), strict=True))


def _output_keys(output: Any) -> list[str]:
    return [f"output {index}" for index, _ in enumerate(output_tensors(output))]


def onnx_layers(
    path: Path, arguments: Arguments, level: RuntimeLevel = RuntimeLevel.DISABLE_ALL
) -> dict[str, torch.Tensor]:
    """Return the output of every layer of a file of ours, in the order of its nodes."""
    model = onnx.load(path)
    outputs = [entry.name for entry in model.graph.output]
    values_of = layer_values(model)
    values = all_values(path, arguments, level)
    layers = {layer: values[value] for layer, value in values_of.items() if value in values}
    return layers | {f"output {i}": values[name] for i, name in enumerate(outputs)}


def layer_values(model: onnx.ModelProto) -> dict[str, str]:
    """Return the name of the value that each layer gives, in the order of execution."""
    last: dict[str, str] = {}
    for node in model.graph.node:
        layer = node.name.rpartition("/")[0]
        parts = layer.split(".") if layer else []
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            last.pop(name, None)  # so that the order is that of the last node
            last[name] = node.output[0]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    folded, moved = _entry(metadata, FOLDED_KEY, {}), _entry(metadata, MOVED_KEY, [])
    takers = {taker: norm for norm, taker in folded.items()}
    named = ((takers.get(name, name), value) for name, value in last.items())
    return {name: value for name, value in named if name not in moved}


def _entry(metadata: dict[str, str], key: str, default: Any) -> Any:
    """Return what a file says under a key; it may have another author who means another thing."""
    try:
        value = json.loads(metadata[key])
    except (KeyError, ValueError):
        return default
    items = [*value.items()] if isinstance(value, dict) else value
    texts = isinstance(value, type(default)) and pytree.tree_all(_is_text, items)
    return value if texts else default


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def all_values(path: Path, arguments: Arguments, level: RuntimeLevel) -> dict[str, torch.Tensor]:
    """Run a file with every value between its nodes made an output, and return them by name."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True)
    typed = {info.name: info for info in model.graph.value_info}
    present = {entry.name for entry in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name and name not in present:
                info = typed.get(name) or onnx.ValueInfoProto(name=name)
                model.graph.output.append(info)
                present.add(name)
    with tempfile.TemporaryDirectory() as folder:
        opened = Path(folder) / "model.onnx"
        onnx.save(model, opened, save_as_external_data=model.ByteSize() > _LARGEST_PROTO)
        return OnnxRunner(opened, level, name=path.name).run(arguments)


_LARGEST_PROTO = 2**31 - 1
