"""The running statistics of a model's layers while they are estimated anew."""

from __future__ import annotations

import functools
import operator
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.errors import BnconvertError
from bnconvert.layers import Kind
from bnconvert.layers.group import group_of
from bnconvert.layers.kinds import why_unknown
from bnconvert.layers.sync import SyncMixin
from bnconvert.recalibration.moments import Moments, merged
from bnconvert.report import LayerReport, Outcome, Report
from bnconvert.walk import Norm, find_norms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bnconvert.collective import Ranks

_WHY_LEFT = {
    Kind.FROZEN: "its statistics are frozen",
    Kind.FOREIGN_FROZEN: "{type} is frozen",
    Kind.LAZY: "{type} has no channels yet; run a batch through the model first",
    Kind.SCRIPTED: "it is scripted, and what reaches it cannot be seen",
    Kind.EXPORTED: "it is an exported graph, and what reaches its layers cannot be seen",
}


@dataclass(frozen=True)
class Shift:
    """How far the statistics of a layer moved.

    Attributes:
        name: First qualified name of the layer.
        mean: Largest change of a channel's mean, in its former standard deviations; variances
            count with the layer's eps added, as they do in the layer.
        variance_low: Smallest ratio of new to former variance.
        variance_high: Largest ratio of new to former variance.
    """

    name: str
    mean: float
    variance_low: float
    variance_high: float

    def __str__(self) -> str:
        return (
            f"mean moved by up to {self.mean:.3g} sd, "
            f"variance x {self.variance_low:.3g} to {self.variance_high:.3g}"
        )


@dataclass(frozen=True)
class RecalibrationReport(Report):
    """A report with the shift of each layer that was recalibrated.

    Attributes:
        shifts: One entry per layer, in the order of the model.
    """

    shifts: tuple[Shift, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain types, with the list `shifts`."""
        return {**super().to_dict(), "shifts": [asdict(shift) for shift in self.shifts]}


@dataclass(frozen=True)
class _Averages:
    """Sums over batches of their means and unbiased variances."""

    batches: int
    mean: Tensor
    variance: Tensor

    def __add__(self, other: _Averages) -> _Averages:
        return _Averages(
            self.batches + other.batches, self.mean + other.mean, self.variance + other.variance
        )


@dataclass
class Statistics:
    """What was gathered for one layer, and its statistics from before.

    Attributes:
        name: First qualified name of the layer, for messages.
        mean: The layer's `running_mean`, written in place.
        variance: The layer's `running_var`, written in place.
        fresh: Moments of the calls that wait for the layer's statistics.
        parts: Moments of all ranks that were pooled since the pass began.
        averages: Sums of the batches' statistics.
        restless: How far a further pass would move the statistics, in standard deviations.
    """

    name: str
    layer: nn.Module
    mean: Tensor
    variance: Tensor
    fresh: list[Moments] = field(default_factory=list)
    parts: list[Moments] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = (self.mean.clone(), self.variance.clone())
        zero = torch.zeros(self.mean.shape, dtype=torch.float64)
        self.averages = _Averages(0, zero, zero)
        self.restless = 0.0

    @property
    def eps(self) -> float:
        """The layer's eps, or the smallest value that can be added to a variance of zero."""
        return max(float(getattr(self.layer, "eps", 0.0)), torch.finfo(torch.float64).tiny)

    @property
    def reached(self) -> bool:
        """Whether values came to the layer."""
        return bool(self.parts) or self.averages.batches > 0

    def settle_part(self) -> None:
        """Give the layer the statistics of all pooled parts."""
        moments = merged(self.parts)
        self._check_count(moments)
        self._write(moments.mean, moments.unbiased_variance)

    def rests(self) -> bool:
        """Return whether the pooled parts are what the layer has, and remember how far from it."""
        moments = merged(self.parts)
        new = moments.mean.to(self.mean), moments.unbiased_variance.to(self.variance)
        shift = self._shift((self.mean, self.variance), new)
        moved = max(shift.mean, shift.variance_high - 1, 1 - shift.variance_low)
        self.restless = moved if moved > 16 * torch.finfo(self.mean.dtype).eps else 0.0
        return self.restless == 0

    def add_batch(self, moments: Moments) -> None:
        """Count a batch, and let the layer normalize it by its own statistics."""
        self._check_count(moments)
        self._write(moments.mean, moments.variance)
        self.averages += _Averages(1, moments.mean, moments.unbiased_variance)

    def settle_average(self, averages: Sequence[_Averages]) -> None:
        """Give the layer the average over the batches of all ranks."""
        total = functools.reduce(operator.add, averages)
        self.averages = total
        if total.batches:
            self._write(total.mean / total.batches, total.variance / total.batches)

    def restore(self) -> None:
        """Take back everything that was written."""
        with torch.no_grad():
            self.mean.copy_(self._before[0])
            self.variance.copy_(self._before[1])

    def group_ranks(self, ranks: Ranks) -> list[int] | None:
        """Return the ranks over which the layer synchronises; None when it does not."""
        if ranks.size == 1 or not isinstance(self.layer, (SyncMixin, nn.SyncBatchNorm)):
            return None
        return ranks.members(group_of(self.layer))

    def shift(self) -> Shift:
        """Compare the statistics with those from before."""
        return self._shift(self._before, (self.mean, self.variance))

    def _shift(self, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Shift:
        before, now = ([t.detach().double().cpu() for t in pair] for pair in (old, new))
        moved = (now[0] - before[0]).abs() / (before[1] + self.eps).sqrt()
        low, high = torch.aminmax((now[1] + self.eps) / (before[1] + self.eps))
        return Shift(self.name, float(moved.max()), float(low), float(high))

    def _check_count(self, moments: Moments) -> None:
        if moments.count < 2:
            raise BnconvertError(
                f"{self.name or 'the model'}: got {moments.count} values per channel; "
                "a variance needs 2, give larger batches"
            )

    def _write(self, mean: Tensor, variance: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(mean)
            self.variance.copy_(variance)
        for kind, tensor in (("mean", self.mean), ("variance", self.variance)):
            finite = torch.isfinite(tensor)
            if not bool(finite.all()):
                channel = int((~finite).nonzero()[0])
                raise BnconvertError(
                    f"{self.name or 'the model'}: the {kind} of channel {channel} is "
                    f"{float(tensor[channel])} in {tensor.dtype}; check the data, or use a "
                    "wider dtype"
                )


@dataclass(frozen=True)
class Found:
    """The layers of a model, with those that are left and why.

    Attributes:
        statistics: The layers to recalibrate, in the order of the model.
        norms: Every layer, with the reason to leave it, or "".
    """

    statistics: dict[nn.Module, Statistics]
    norms: tuple[tuple[Norm, str], ...]


def find_layers(model: nn.Module) -> Found:
    """Return the layers whose running statistics can be estimated anew."""
    fused = _in_quantized_training(model)
    norms = tuple(
        (norm, fused.get(norm.module) or _reason_to_leave(norm)) for norm in find_norms(model)
    )
    statistics = {
        norm.module: Statistics(
            norm.name,
            norm.module,
            norm.module._buffers["running_mean"],  # type: ignore[arg-type]
            norm.module._buffers["running_var"],  # type: ignore[arg-type]
        )
        for norm, reason in norms
        if not reason
    }
    return Found(statistics, norms)


def _in_quantized_training(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers inside fused layers for quantization-aware training, with the reason."""
    fused = sys.modules.get("torch.ao.nn.intrinsic.qat")
    if fused is None:
        return {}
    kinds = (fused.ConvBn1d, fused.ConvBn2d, fused.ConvBn3d, fused.LinearBn1d)
    return {
        module.bn: f"it is part of a {type(module).__name__}, whose quantized weights depend on "
        "its statistics; recalibrate before the layers are fused"
        for module in model.modules()
        if isinstance(module, kinds)
    }


def _reason_to_leave(norm: Norm) -> str:
    if norm.kind is Kind.UNKNOWN:
        return f"{why_unknown(norm.module)}, so what it does with statistics is unknown"
    if norm.kind in _WHY_LEFT:
        return _WHY_LEFT[norm.kind].format(type=type(norm.module).__name__)
    if any(norm.module._buffers.get(name) is None for name in ("running_mean", "running_var")):
        return "it has no running statistics (track_running_stats=False)"
    return ""


def make_report(found: Found) -> RecalibrationReport:
    """Return what happened to each layer."""
    shifts = {layer: s.shift() for layer, s in found.statistics.items() if s.reached}
    layers: list[LayerReport] = []
    for norm, reason in found.norms:
        shift = shifts.get(norm.module)
        if shift is None:
            why = reason or "the forward pass does not call it"
            layers += norm.entries(Outcome.LEFT, reason=why)
        else:
            restless = found.statistics[norm.module].restless
            moves = f"; fed by its own output, which still moves it by {restless:.1g} sd per pass"
            now = f"{shift}{moves if restless else ''}"
            layers += norm.entries(Outcome.REWRITTEN, now=now)
    return RecalibrationReport("recalibrate", tuple(layers), tuple(shifts.values()))
