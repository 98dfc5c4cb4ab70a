"""`torch.export` archives (.pt2): weights by name, eps from the serialized graph, nothing run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint import torch_zip
from bnconvert.checkpoint.layouts import choose
from bnconvert.checkpoint.pickle_values import as_lazy
from bnconvert.checkpoint.record import Fact, Weights
from bnconvert.checkpoint.registry import Format, Options, only_raw
from bnconvert.checkpoint.source import Extent
from bnconvert.checkpoint.tensors import LazyTensor, from_strides
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from bnconvert.checkpoint.archive import Archive
    from bnconvert.checkpoint.probe import Probe

CONFIG = "weights/model_weights_config.json"
OLD_STATE, OLD_PROGRAM = "serialized_state_dict.pt", "serialized_exported_program.json"
MAX_JSON = 1 << 28

DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64,
    6: torch.float16, 7: torch.float32, 8: torch.float64, 10: torch.complex64,
    11: torch.complex128, 12: torch.bool, 13: torch.bfloat16, 28: torch.uint16,
    29: torch.float8_e4m3fn, 30: torch.float8_e5m2,
}  # fmt: skip
"""torch's serialized scalar types, by number."""


def is_pt2(found: Probe) -> bool:
    """Return whether a path is an archive of `torch.export.save`, new or old."""
    return found.zip_has(CONFIG) or found.zip_has(OLD_STATE)


def read(found: Probe, options: Options) -> Weights:
    """Return the weights of an exported program.

    Raises:
        CheckpointError: The archive is damaged.
    """
    archive = found.archive
    if archive is None:
        raise CheckpointError(f"{found.path}: is no archive")
    if found.zip_has(OLD_STATE):
        weights = _old_state(archive, options)
        programs = [name for name in archive.names() if name.endswith(OLD_PROGRAM)]
    else:
        weights = Weights()
        _new_state(archive, weights)
        programs = [n for n in archive.names() if "/models/" in n and n.endswith(".json")]
    weights.layout = "exported program"
    for name in programs:
        _facts(_json(archive, name), weights)
    return weights


def _old_state(archive: Archive, options: Options) -> Weights:
    name = next(name for name in archive.names() if name.endswith(OLD_STATE))
    segment = archive.segment(name)
    if not isinstance(segment, Extent):
        raise CheckpointError(f"{archive.where}: its weights are compressed; export it again")
    tree, _ = torch_zip.read_pickle(segment, options.allow)
    return choose(tree, options.weights)


def _new_state(archive: Archive, weights: Weights) -> None:
    config_name = next(name for name in archive.names() if name.endswith(CONFIG))
    folder = config_name.removesuffix("model_weights_config.json")
    config = _json(archive, config_name).get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{archive.where}: lists no weights; it is damaged")
    for name, entry in config.items():
        weights.tensors[name] = _named_tensor(archive, folder, name, entry)


def _named_tensor(archive: Archive, folder: str, name: str, entry: dict[str, Any]) -> LazyTensor:
    try:
        return _tensor(archive, folder, entry)
    except (KeyError, TypeError, CheckpointError) as error:
        raise CheckpointError(f"{archive.where}: {name}: {error}") from error


def _tensor(archive: Archive, folder: str, entry: dict[str, Any]) -> LazyTensor:
    segment = archive.segment(folder + entry["path_name"])
    if entry["use_pickle"]:
        if not isinstance(segment, Extent):
            raise CheckpointError("is compressed inside the archive")
        tensor = as_lazy(torch_zip.read_pickle(segment)[0])
        if tensor is None:
            raise CheckpointError("is not a tensor")
        return tensor
    meta = entry["tensor_meta"]
    if meta["dtype"] not in DTYPES:
        raise CheckpointError(f"has scalar type {meta['dtype']}, which is not one of numbers")
    return from_strides(
        segment,
        DTYPES[meta["dtype"]],
        _ints(meta["sizes"]),
        _ints(meta["strides"]),
        _ints([meta["storage_offset"]])[0],
        shares=("pt2", entry["path_name"]),
    )


def _ints(values: list[dict[str, Any]]) -> tuple[int, ...]:
    numbers = tuple(value["as_int"] for value in values)
    if not all(type(number) is int for number in numbers) or len(numbers) > 64:
        raise CheckpointError("has a shape that is not one")
    return numbers


def _json(archive: Archive, name: str) -> dict[str, Any]:
    try:
        value = json.loads(archive.read(name, MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{archive.where}: {name} is not JSON; it is damaged") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{archive.where}: {name} is not a dictionary; it is damaged")
    return value


def _facts(program: dict[str, Any], weights: Weights) -> None:
    """Take eps from every batch_norm node whose statistics are a buffer of the model."""
    try:
        module = program["graph_module"]
        buffers = {
            spec["buffer"]["arg"]["name"]: spec["buffer"]["buffer_name"]
            for spec in module["signature"]["input_specs"]
            if "buffer" in spec
        }
        for node in module["graph"]["nodes"]:
            if "batch_norm" not in node["target"]:
                continue
            given = {item["name"]: item["arg"] for item in node["inputs"]}
            mean = given["running_mean"].get("as_tensor", {}).get("name")
            eps = given["eps"].get("as_float")
            layer = str(buffers.get(mean, "")).rpartition(".")[0]
            if mean in buffers and isinstance(eps, float):
                weights.bn[layer] = {"eps": Fact(eps, "exported graph")}
    except (KeyError, TypeError, AttributeError) as error:
        weights.notes.append(f"the program's graph has another form ({error}); no eps was read")


def _read(found: Probe, options: Options) -> Weights:
    return only_raw(read(found, options), options)


FORMAT = Format("torch.export archive", is_pt2, _read)
