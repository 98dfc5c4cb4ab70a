"""Keras models and weights: Keras 2 `.h5`, Keras 3 `.weights.h5` and `.keras`.

Tensors are named by layer and torch leaf. eps, momentum and axis come from the model's config,
which `.weights.h5` files do not have.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import frameworks
from bnconvert.checkpoint.hdf5 import SIGNATURE, Hdf5File, Listing
from bnconvert.checkpoint.record import Fact, Facts, Weights
from bnconvert.checkpoint.registry import Format, Options, only_raw
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bnconvert.checkpoint.probe import Probe
    from bnconvert.checkpoint.tensors import LazyTensor

MEMBER, CONFIG = "model.weights.h5", "config.json"
MAX_NESTED = 32
NORM = ("BatchNormalization", "SyncBatchNormalization", "BatchNormalizationV1")
_LEAVES = {
    "dense": ("kernel", "bias"),
    "conv": ("kernel", "bias"),
    "depthwise_conv": ("depthwise_kernel", "bias"),
    "separable_conv": ("depthwise_kernel", "pointwise_kernel", "bias"),
    "embedding": ("embeddings",),
}


@dataclass(frozen=True)
class Layer:
    """A layer of the model's config."""

    name: str
    type: str
    config: dict[str, Any]

    def facts(self) -> Facts:
        """Return what is known of a BatchNormalization layer, in torch's terms."""
        eps, momentum = self.config.get("epsilon"), self.config.get("momentum")
        facts: Facts = {"class": Fact(self.type, "model_config")}
        if isinstance(eps, (int, float)):
            facts["eps"] = Fact(eps, "model_config")
        if isinstance(momentum, (int, float)):
            inverted = float(f"{1 - momentum:.12g}")
            facts["momentum"] = Fact(inverted, f"model_config, 1 - {momentum:g}")
        return facts


def is_hdf5(found: Probe) -> bool:
    """Return whether a file is HDF5, or a Keras 3 archive around one."""
    return found.head.startswith(SIGNATURE) or (
        found.archive is not None and MEMBER in found.archive and CONFIG in found.archive
    )


def read(found: Probe, options: Options) -> Weights:
    """Return the weights of a Keras file by layer.

    Raises:
        CheckpointError: It is damaged, h5py is missing, or variables without names cannot be
            told apart.
    """
    file, config = _open(found)
    listing = file.listing()
    texts = listing.attributes.get("", {})
    if config is None and "model_config" in texts:
        config = _json(found, texts["model_config"])
    layers = list(_layers(config)) if config else []
    weights = Weights(layout="Keras")
    unnamed: dict[str, dict[int, LazyTensor]] = {}
    for path, entry in listing.datasets.items():
        parts = path.split("/")
        if parts[0] in ("optimizer_weights", "optimizer", "seed_generator"):
            continue
        tensor = file.tensor(path, entry)
        if len(parts) > 2 and parts[-2] == "vars" and parts[-1].isdigit():
            unnamed.setdefault("/".join(parts[:-2]), {})[int(parts[-1])] = tensor
        else:
            _add_named(weights, parts, tensor, {layer.name: layer for layer in layers}, listing)
    _add_unnamed(weights, unnamed, layers)
    known = {layer.name: layer for layer in layers if layer.type in NORM}
    for name in list(dict.fromkeys(key.rpartition(".")[0] for key in weights.tensors)):
        layer = known.get(name)
        if layer is not None:
            weights.bn[name] = layer.facts()
            if layer.config.get("axis") not in (None, -1, 3, [3], [-1]):
                weights.notes.append(f"{name} normalises axis {layer.config['axis']}")
    return only_raw(weights, options)


def _open(found: Probe) -> tuple[Hdf5File, dict[str, Any] | None]:
    archive = found.archive
    if archive is None:
        return Hdf5File(found.source.path.resolve(), str(found.path)), None
    config = _json(found, archive.read(CONFIG, 1 << 26).decode("utf-8", "replace"))
    with tempfile.TemporaryFile() as copy:
        for chunk in archive.segment(MEMBER).chunks():
            copy.write(chunk)
        copy.flush()
        return Hdf5File(found.path, str(found.path), copy.fileno()), config


def _json(found: Probe, text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{found.path}: its model config is not JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{found.path}: its model config is not a dictionary")
    return value


def _layers(model: dict[str, Any], depth: int = 0) -> Iterator[Layer]:
    """Yield the layers of a model's config in order, those of inner models too."""
    if depth > MAX_NESTED:
        raise CheckpointError("its model config is nested endlessly")
    config = model.get("config")
    inner = config.get("layers") if isinstance(config, dict) else config
    for entry in inner if isinstance(inner, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), (dict, list)):
            continue
        own = entry["config"] if isinstance(entry["config"], dict) else {}
        name = own.get("name") or entry.get("name") or ""
        yield Layer(str(name), str(entry.get("class_name", "")), own)
        yield from _layers(entry, depth + 1)
        wrapped = own.get("layer")
        if isinstance(wrapped, dict):
            yield from _layers({"config": [wrapped]}, depth + 1)


def _add_named(
    weights: Weights,
    parts: list[str],
    tensor: LazyTensor,
    layers: dict[str, Layer],
    listing: Listing,
) -> None:
    """Enter a dataset whose path ends in the variable's name, as Keras 2 has it."""
    path = parts[1:-1] if parts[0] == "model_weights" else parts[:-1]
    known = [part for part in path if part in layers]
    name = known[-1] if known else ".".join(dict.fromkeys(path[:1] + path[-1:]))
    if not known and len(path) > 1 and path[-1].startswith(path[0]):
        name = path[0]
    kind = layers[name].type if name in layers else name
    leaf = parts[-1].split(":")[0]
    leaf, tensor = frameworks.leaf_of(leaf, tensor, "transpose" in kind.lower())
    if leaf == "kernel" and "depthwiseconv" in kind.lower().replace("_", ""):
        tensor = tensor.ordered("HWIM")
    if leaf == "depthwise.kernel" and "separable" not in kind.lower():
        leaf = "kernel"
    frameworks.add(weights.tensors, name, leaf, tensor)


def _add_unnamed(
    weights: Weights, groups: dict[str, dict[int, LazyTensor]], layers: list[Layer]
) -> None:
    """Enter Keras 3 variables, which are numbered in the order in which the layer made them."""
    by_group = _by_group(layers)
    for group, variables in groups.items():
        parts = [part for part in group.split("/") if part not in ("layers", "_layer")]
        short = parts[-1] if parts else ""
        layer = by_group.get(short)
        name = layer.name if layer else ".".join(parts)
        kind = snake(layer.type) if layer else re.sub(r"_\d+$", "", short)
        count = len(variables)
        if sorted(variables) != list(range(count)):
            raise CheckpointError(f"{group} misses a variable; the file is damaged")
        for index, leaf in enumerate(_leaves(group, kind, count, layer)):
            new, tensor = frameworks.leaf_of(leaf, variables[index], "transpose" in kind)
            if new == "depthwise.kernel" and "separable" not in kind:
                new = "kernel"
            frameworks.add(weights.tensors, name, new, tensor)


def _leaves(group: str, kind: str, count: int, layer: Layer | None) -> list[str]:
    if "batch_normalization" in kind:
        return _norm_leaves(group, count, layer)
    plain = re.sub(r"_?\d+d$|\d+d(?=_)", "", kind).removesuffix("_transpose")
    leaves = _LEAVES.get(plain)
    if leaves is None or count > len(leaves):
        return [f"variable_{index}" for index in range(count)]
    return list(leaves[:count])


def _norm_leaves(group: str, count: int, layer: Layer | None) -> list[str]:
    statistics = ["moving_mean", "moving_variance"]
    if layer is not None:
        own = [
            n for n, on in (("gamma", "scale"), ("beta", "center")) if layer.config.get(on, True)
        ]
        if len(own) + 2 != count:
            raise CheckpointError(f"{group} has {count} variables where its config has other ones")
        return own + statistics
    if count in (2, 4):
        return (["gamma", "beta"] if count == 4 else []) + statistics
    raise CheckpointError(
        f"{group} has {count} variables and no config says whether gamma or beta is missing; name "
        "the .keras file of the model"
    )


def _by_group(layers: list[Layer]) -> dict[str, Layer]:
    """Return layers by the name of their group: their own, or their class with a counter."""
    result = {layer.name: layer for layer in layers}
    counts: dict[str, int] = {}
    for layer in layers:
        name = snake(layer.type)
        number = counts.get(name, -1) + 1
        counts[name] = number
        result.setdefault(f"{name}_{number}" if number else name, layer)
    return result


def snake(name: str) -> str:
    """Return a class name as Keras writes it in file paths: BatchNormalization, Conv2D."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


FORMAT = Format("Keras HDF5", is_hdf5, read)
