"""What bnconvert would run on here: versions, devices, process-group backends, kernels."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from bnconvert import __version__
from bnconvert.kernels import ops
from bnconvert.report import SCHEMA, format_table

PACKAGES = ("torch", "timm", "safetensors", "onnx", "onnxscript", "onnxruntime", "click", "rich")


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        facts: Label and value, in the order to print.
    """

    facts: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, ready for JSON."""
        return {"schema": SCHEMA, **dict(self.facts)}

    def __str__(self) -> str:
        return "\n".join(format_table(list(self.facts), indent=""))


def diagnose() -> Diagnosis:
    """Look at this process's Python, packages, devices and backends; nothing is started."""
    facts = [
        ("bnconvert", __version__),
        ("python", f"{platform.python_version()} ({platform.machine()})"),
    ]
    facts += [(name, _version(name)) for name in PACKAGES]
    facts += [
        ("torch built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"),
        ("CPU threads", str(torch.get_num_threads())),
    ]
    facts += _devices()
    facts += [
        ("process group backends", ", ".join(_backends()) or "none"),
        ("NCCL", _nccl()),
    ]
    facts += [(f"kernels for {device}", choice) for device, choice in ops.selection().items()]
    return Diagnosis(tuple(facts))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("CUDA devices", "none")]
    return [
        (f"cuda:{index}", f"{found.name}, sm_{found.major}{found.minor}")
        for index in range(torch.cuda.device_count())
        for found in [torch.cuda.get_device_properties(index)]
    ]


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return [name for name, is_there in available.items() if is_there]


def _nccl() -> str:
    if not (dist.is_available() and dist.is_nccl_available()):
        return "not in this build of torch"
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))
