"""What folding did to a whole model: layers, parameters and, if measured, latency."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnconvert.report import Report

_RUNS = 20
_WARM_UP = 3


@dataclass(frozen=True)
class Size:
    """How large a model is.

    Attributes:
        parameters: Number of values in parameters and buffers.
        layers: Number of modules that hold tensors, or have no children and are no identities.
    """

    parameters: int
    layers: int


def measure_size(model: nn.Module) -> Size:
    """Return the size of a model; what it shares counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    return Size(sum(tensor.numel() for tensor in tensors), sum(map(_is_layer, model.modules())))


def _is_layer(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    holds = any(tensor is not None for tensor in own)
    return holds or (not module._modules and not isinstance(module, torch.nn.Identity))


def measure_latency(before: nn.Module, after: nn.Module, images: Tensor) -> tuple[float, float]:
    """Return the median seconds that two models take for a batch, measured in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for run in range(_WARM_UP + _RUNS):
            for model, measured in zip((before, after), seconds, strict=True):
                _wait(images)
                start = time.perf_counter()
                model(images)
                _wait(images)
                if run >= _WARM_UP:
                    measured.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _wait(images: Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)


@dataclass(frozen=True)
class FoldSummary:
    """The report of a fold with the model's size, and its latency if measured.

    Attributes:
        report: What became of each norm.
        before: The model's size before.
        after: The model's size after.
        latency: Median seconds before and after, or None.
        batch: Number of images that the latency is for.
    """

    report: Report
    before: Size
    after: Size
    latency: tuple[float, float] | None = None
    batch: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain types, ready for JSON."""
        latency = None
        if self.latency is not None:
            before, after = self.latency
            latency = {"batch": self.batch, "before_s": before, "after_s": after}
        return {
            **self.report.to_dict(),
            "parameters": {"before": self.before.parameters, "after": self.after.parameters},
            "layer_count": {"before": self.before.layers, "after": self.after.layers},
            "latency": latency,
        }

    def __str__(self) -> str:
        """Return the report's table with lines on size and latency."""
        one, two = self.before, self.after
        lines = [
            str(self.report),
            f"  layers: {one.layers} -> {two.layers}",
            f"  parameters and buffers: {one.parameters:,} -> {two.parameters:,}",
        ]
        if self.latency is not None:
            before, after = self.latency
            lines.append(
                f"  median latency of a batch of {self.batch}: {before * 1e3:.1f} ms -> "
                f"{after * 1e3:.1f} ms ({before / after:.2f}x)"
            )
        return "\n".join(lines)
