"""ONNX models: tensors of initializers and Constant nodes, eps and roles from the BN nodes.

Read without the onnx library: its parser needs the whole model in memory. Field numbers are those
of onnx.proto3.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint.names import LEAVES
from bnconvert.checkpoint.probe import Probe, inside
from bnconvert.checkpoint.protobuf import (
    BYTES,
    FIXED32,
    Value,
    fields,
    number,
    payload,
    text,
    varints,
)
from bnconvert.checkpoint.record import Fact, Weights
from bnconvert.checkpoint.registry import Format, Options, only_raw
from bnconvert.checkpoint.source import Extent, Memory, Segment, SourceFile
from bnconvert.checkpoint.tensors import LazyTensor, from_segment
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16,
    6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
    12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz,
}  # fmt: skip
MODEL_FIELDS = {1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26}
GRAPH, IR_VERSION = 7, 1
DEFAULT_EPSILON, DEFAULT_MOMENTUM = 1e-5, 0.9


@dataclass
class Node:
    """A node of the graph, as far as it is needed."""

    op: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)


def is_onnx(found: Probe) -> bool:
    """Return whether a file is an ONNX model: a message with a version and a graph."""
    if found.file is None or found.archive is not None:
        return False
    version = graph = False
    try:
        for count, (number_, wire, _) in enumerate(fields(found.file.extent())):
            if number_ not in MODEL_FIELDS or count > 10_000:
                return False
            version |= number_ == IR_VERSION and wire != BYTES
            graph |= number_ == GRAPH and wire == BYTES
    except CheckpointError:
        return False
    return version and graph


def read(found: Probe, options: Options) -> Weights:
    """Return the tensors of a model.

    Raises:
        CheckpointError: The model is damaged, or names external data outside its folder.
    """
    reader = _Reader(found.path.parent)
    for number_, _, value in fields(found.source.extent()):
        if number_ == GRAPH:
            reader.graph(payload(value))
    weights = Weights(reader.tensors, layout="ONNX graph", files=list(reader.external.values()))
    if reader.subgraphs:
        weights.notes.append(f"{reader.subgraphs} subgraphs were not searched for tensors")
    _name_batchnorm(reader, weights)
    return only_raw(weights, options)


class _Reader:
    """Collects tensors and nodes of one graph."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, LazyTensor] = {}
        self.nodes: list[Node] = []
        self.external: dict[str, SourceFile] = {}
        self.subgraphs = 0

    def graph(self, message: bytes | Extent) -> None:
        for number_, _, value in fields(message):
            if number_ == 5:
                name, tensor = self.tensor(payload(value))
                self.add(name, tensor)
            elif number_ == 1:
                self.node(payload(value))

    def add(self, name: str, tensor: LazyTensor | None) -> None:
        if tensor is None:
            return
        if name in self.tensors:
            raise CheckpointError(f"two tensors are named {name!r}; the model is damaged")
        self.tensors[name] = tensor

    def node(self, message: bytes | Extent) -> None:
        node = Node()
        constant: LazyTensor | None = None
        for number_, _, value in fields(message):
            if number_ == 1:
                node.inputs.append(text(value))
            elif number_ == 2:
                node.outputs.append(text(value))
            elif number_ in (3, 4):
                setattr(node, "name" if number_ == 3 else "op", text(value))
            elif number_ == 5:
                key, content = self.attribute(payload(value))
                if isinstance(content, LazyTensor):
                    constant = content
                else:
                    node.attributes[key] = content
        if node.op == "Constant" and node.outputs:
            self.add(node.outputs[0], constant)
        elif node.op in ("BatchNormalization", "Identity"):
            self.nodes.append(node)

    def attribute(self, message: bytes | Extent) -> tuple[str, Any]:
        name, content = "", None
        for number_, wire, value in fields(message):
            if number_ == 1:
                name = text(value)
            elif number_ == 2 and wire == FIXED32:
                content = struct.unpack("<f", bytes(_small(value)))[0]
            elif number_ == 3:
                content = number(value)
            elif number_ == 5:
                content = self.tensor(payload(value))[1]
            elif number_ in (6, 11):
                self.subgraphs += 1
        return name, content

    def tensor(self, message: bytes | Extent) -> tuple[str, LazyTensor | None]:
        parts: dict[int, list[Value]] = {}
        for number_, _, value in fields(message):
            parts.setdefault(number_, []).append(value)
        name = text(parts.get(8, [b""])[-1])
        try:
            return name, self._tensor(parts)
        except CheckpointError as error:
            raise CheckpointError(f"{name or 'a tensor'}: {error}") from error

    def _tensor(self, parts: dict[int, list[Value]]) -> LazyTensor | None:
        shape = tuple(size for value in parts.get(1, []) for size in varints(value))
        kind = number(parts.get(2, [0])[-1])
        if kind == 8:
            return None  # strings are no weights
        if kind not in TYPES:
            raise CheckpointError(f"has ONNX type {kind}, which torch has not")
        dtype = TYPES[kind]
        if 13 in parts:
            return from_segment(self._external(parts[13]), dtype, shape)
        if 9 in parts:
            return from_segment(_segment(payload(parts[9][-1])), dtype, shape)
        return _typed(parts, dtype, shape)

    def _external(self, entries: list[Value]) -> Extent:
        told: dict[str, str] = {}
        for entry in entries:
            pair = {number_: text(value) for number_, _, value in fields(payload(entry))}
            told[pair.get(1, "")] = pair.get(2, "")
        location = told.get("location", "")
        if location not in self.external:
            self.external[location] = SourceFile(inside(self.folder, location))
        file = self.external[location]
        try:
            offset = int(told.get("offset", "0"))
            length = int(told["length"]) if "length" in told else None
        except ValueError as error:
            raise CheckpointError("its external data has an offset that is no number") from error
        return file.extent(offset, length, "external data")


def _segment(value: bytes | Extent) -> Segment:
    return Memory(value) if isinstance(value, bytes) else value


def _small(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise CheckpointError("its protocol buffer is damaged")
    return value


def _typed(parts: dict[int, list[Value]], dtype: torch.dtype, shape: tuple[int, ...]) -> LazyTensor:
    """Return a tensor whose values are in a typed field: floats as bytes, integers as varints."""
    plain = {torch.float32: 4, torch.complex64: 4, torch.float64: 10, torch.complex128: 10}
    if dtype in plain:
        values = [payload(value) for value in parts.get(plain[dtype], [])]
        whole = values[0] if len(values) == 1 else b"".join(map(_joined, values))
        return from_segment(_segment(whole), dtype, shape)
    source = {torch.int64: 7, torch.uint32: 11, torch.uint64: 11}.get(dtype, 5)
    numbers = [item for value in parts.get(source, []) for item in varints(value)]
    mask = (1 << (8 * dtype.itemsize)) - 1
    data = b"".join((item & mask).to_bytes(dtype.itemsize, "little") for item in numbers)
    return from_segment(Memory(data), dtype, shape)


def _joined(value: bytes | Extent) -> bytes:
    return value if isinstance(value, bytes) else value.read()


def _name_batchnorm(reader: _Reader, weights: Weights) -> None:
    """Give the tensors of BN nodes the names of a layer, and keep eps and momentum with it."""
    source = {node.outputs[0]: node.inputs[0] for node in reader.nodes if _is_identity(node)}
    roles: dict[str, list[str]] = {}
    for node in reader.nodes:
        if node.op != "BatchNormalization" or len(node.inputs) < 5:
            continue
        origins = [_origin(name, source) for name in node.inputs[1:5]]
        layer = _layer_name(origins, node, taken=set(weights.bn))
        weights.bn[layer] = _facts(node)
        for leaf, origin in zip(LEAVES, origins, strict=False):
            if origin in reader.tensors:
                roles.setdefault(origin, []).append(f"{layer}.{leaf}")
            else:
                weights.notes.append(f"{layer}.{leaf} is computed in the graph ({origin})")
    weights.tensors = dict(_renamed(weights.tensors, roles))


def _renamed(
    tensors: dict[str, LazyTensor], roles: dict[str, list[str]]
) -> Iterator[tuple[str, LazyTensor]]:
    seen: set[str] = set()
    for name, tensor in tensors.items():
        for new in roles.get(name, [name]):
            if new in seen:
                raise CheckpointError(f"two tensors would be named {new!r}")
            seen.add(new)
            yield new, tensor


def _is_identity(node: Node) -> bool:
    return node.op == "Identity" and len(node.inputs) == 1 and len(node.outputs) == 1


def _origin(name: str, source: dict[str, str]) -> str:
    for _ in range(100):
        if name not in source:
            return name
        name = source[name]
    return name


def _layer_name(origins: list[str], node: Node, taken: set[str]) -> str:
    """Return the part that the four names share up to a separator, or the node's own name."""
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*origins, strict=False))
    common = "".join(column[0] for column in same)
    at = max(common.rfind(separator) for separator in "./:_")
    candidates = [common[:at] if at > 0 else "", node.name, *node.outputs[:1]]
    name = next((c for c in candidates if c and c not in taken), "")
    if not name:
        name = f"batch_norm_{len(taken)}"
    return name


def _facts(node: Node) -> dict[str, Fact]:
    eps = node.attributes.get("epsilon", DEFAULT_EPSILON)
    momentum = node.attributes.get("momentum", DEFAULT_MOMENTUM)
    where = "BatchNormalization node"
    facts = {"eps": Fact(_decimal(eps), where)}
    if isinstance(momentum, float):
        told = _decimal(momentum)
        facts["momentum"] = Fact(_decimal(1 - told), f"{where}, 1 - {told:g}")
    return facts


def _decimal(value: Any) -> float:
    """Return the short decimal that a float32 attribute was written from, such as 1e-3."""
    if not isinstance(value, (int, float)):
        raise CheckpointError("a BatchNormalization node has an attribute that is no number")
    return float(f"{value:.7g}")


FORMAT = Format("ONNX", is_onnx, read)
