"""What a file of weights holds, as its format's reader and layout found it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.names import batchnorm_layers
from bnconvert.checkpoint.tensors import LazyTensor, LazyTensors, dtype_name
from bnconvert.report import SCHEMA, format_table

if TYPE_CHECKING:
    from pathlib import Path

    from bnconvert.checkpoint.source import SourceFile

Facts = dict[str, "Fact"]


@dataclass(frozen=True)
class Fact:
    """Something known about a layer that its tensors do not say, such as eps.

    Attributes:
        value: The value.
        source: Where it comes from, such as "pickled module" or "model_config".
    """

    value: Any
    source: str


@dataclass
class Weights:
    """Named tensors of one model, chosen from what a file holds.

    Attributes:
        tensors: By name.
        format: Container, such as "torch zip"; "" where the registry's name of it is right.
        bn: Facts about BatchNorm layers, by layer name.
        notes: What was chosen and what was left out, one sentence each.
        layout: Who wrote the file: "Lightning", "timm", "state dict".
        versions: torch's `_metadata` of the state dict: module name to its attributes.
        architecture: Name of the model's architecture where the file has it.
        files: Every file the tensors come from.
        shared: Names restored by metadata, each with the name that is the same memory.
    """

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    format: str = ""
    bn: dict[str, Facts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    layout: str = "state dict"
    versions: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    files: list[SourceFile] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a file, not yet read.

    Attributes:
        path: The file or folder.
        tensors: Names to tensors; reading one does not read the others.
        format: Container, such as "torch zip" or "safetensors".
        layout: Who wrote it, such as "Lightning" or "state dict".
        bn: Facts about BatchNorm layers that a state dict does not hold (eps, momentum), by layer
            name; each has its source.
        notes: What was chosen and what was left out, one sentence each.
        versions: torch's `_metadata` of the state dict, where the file has it.
        architecture: Name of the model's architecture where the file has it, else "".
        files: The files that were read.
    """

    path: Path
    tensors: LazyTensors
    format: str
    layout: str
    bn: dict[str, Facts]
    notes: tuple[str, ...] = ()
    versions: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    files: tuple[SourceFile, ...] = ()

    @property
    def entries(self) -> dict[str, LazyTensor]:
        """Shape, dtype and place of every tensor, without reading it."""
        return self.tensors.entries

    def weights(self) -> Weights:
        """Return what it holds as a record of its own, to be changed."""
        return Weights(
            dict(self.entries),
            bn=dict(self.bn),
            notes=list(self.notes),
            versions=dict(self.versions),
            architecture=self.architecture,
            files=list(self.files),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what the file holds as plain types, ready for JSON."""
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "format": self.format,
            "layout": self.layout,
            "architecture": self.architecture,
            "tensors": {
                name: {
                    "shape": list(entry.shape),
                    "dtype": dtype_name(entry.dtype),
                    **({"order": entry.order} if entry.order else {}),
                }
                for name, entry in self.entries.items()
            },
            "batchnorm": {
                layer: {
                    name: {"value": fact.value, "source": fact.source}
                    for name, fact in self.bn.get(layer, {}).items()
                }
                for layer in self.batchnorm_layers()
            },
            "notes": list(self.notes),
        }

    def batchnorm_layers(self) -> list[str]:
        """Return the names of the layers that have running statistics, or facts."""
        return list(dict.fromkeys([*batchnorm_layers(self.entries), *self.bn]))

    def __str__(self) -> str:
        """Return a summary: what it is, its tensors by dtype, its BatchNorm layers, the notes."""
        total = sum(entry.nbytes for entry in self.entries.values())
        lines = [
            f"{self.path}: {self.format}, {self.layout}"
            + (f" ({self.architecture})" if self.architecture else ""),
            f"  {len(self.entries)} tensors, {total:,} bytes: {self._dtypes()}",
        ]
        layers = self.batchnorm_layers()
        lines.append(f"  {len(layers)} BatchNorm layers")
        rows: list[tuple[str, ...]] = []
        for layer in layers:
            width = self.entries.get(f"{layer}.running_var")
            facts = self.bn.get(layer, {})
            told = ", ".join(
                f"{key} {fact.value} ({fact.source})"
                for key, fact in facts.items()
                if key in ("eps", "momentum")
            )
            shape = "x".join(map(str, width.shape)) if width else "no statistics"
            rows.append((layer or "(the model)", shape, told or "eps not in the file"))
        lines += format_table(rows, indent="    ")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _dtypes(self) -> str:
        counts: dict[str, int] = {}
        for entry in self.entries.values():
            name = dtype_name(entry.dtype)
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
