"""Chooses the kernels of a device, with a reason: the order of fallback, said once.

Our own kernels come first, then those that torch ships for CUDA, then ATen operators that run
anywhere. The environment variable `BNCONVERT_KERNELS` (own, aten or reference) overrides the choice
and turns a fallback into an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from bnconvert.kernels import native, nvrtc
from bnconvert.kernels.driver import CudaDriver
from bnconvert.kernels.nvrtc import KernelError

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.kernels.native import Driver

VARIABLE = "BNCONVERT_KERNELS"

NAMES = ("own", "aten", "reference")

drivers: dict[torch.device, Driver] = {}
"""What runs our kernels, by device. Tests add a driver for the CPU."""


@dataclass(frozen=True)
class Choice:
    """The kernels that are used.

    Attributes:
        kernels: "own", "aten" (torch's CUDA kernels) or "reference" (ATen operators).
        reason: Why, in words.
    """

    kernels: str
    reason: str


def choose(device: torch.device) -> Choice:
    """Return the kernels for tensors on a device.

    Raises:
        KernelError: `BNCONVERT_KERNELS` asks for kernels that the device cannot run, or for none
            that exist.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _choose(device, device in drivers, os.environ.get(VARIABLE, ""))


@cache
def _choose(device: torch.device, has_driver: bool, wanted: str) -> Choice:
    if wanted not in ("", *NAMES):
        raise KernelError(f"{VARIABLE}={wanted}: there are no such kernels; use one of {NAMES}")
    obstacles: list[str] = []
    for name in NAMES:
        obstacle = _obstacle(name, device, has_driver)
        if not obstacle and wanted in ("", name):
            break
        if name == wanted:
            raise KernelError(f"{VARIABLE}={wanted}: {obstacle}; unset it or use another value")
        if obstacle:
            obstacles.append(f"{name}: {obstacle}")
    if wanted:
        return Choice(name, f"{VARIABLE} is set")
    return Choice(name, "; ".join(obstacles) or f"they run on {device}")


def driver_for(
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> Driver | None:
    """Return the driver of our kernels if they take these tensors, else None.

    Raises:
        KernelError: `BNCONVERT_KERNELS` asks for kernels that cannot take them.
    """
    if choose(input.device).kernels != "own":
        return None
    obstacle = native.unsupported(input, weight, bias, running_mean, running_var)
    if not obstacle:
        return drivers[input.device]
    if os.environ.get(VARIABLE):
        raise KernelError(f"{VARIABLE}=own: {obstacle}; unset it or use another value")
    return None


def _obstacle(name: str, device: torch.device, has_driver: bool) -> str:
    """Return why kernels cannot be used on a device, "" if they can."""
    if name == "own":
        return "" if has_driver else _own_obstacle(device)
    if name == "aten" and device.type != "cuda":
        return f"there are none for {device.type} tensors"
    return ""


@cache
def _own_obstacle(device: torch.device) -> str:
    """Return why our kernels cannot run on a device; if they can, make its driver."""
    if device.type != "cuda":
        return f"there are none for {device.type} tensors"
    if torch.version.hip is not None:
        return "they need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    obstacle = nvrtc.unavailable(10 * major + minor)
    if not obstacle:
        drivers[device] = CudaDriver(device)
    return obstacle
