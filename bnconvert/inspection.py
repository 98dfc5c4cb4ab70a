"""Looking at the BatchNorm layers of a model: what they are, and what is suspicious about them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.layers import Kind, foreign
from bnconvert.layers.frozen import AFFINE, frozen_state, not_parameters
from bnconvert.layers.sync import SyncMixin
from bnconvert.report import SCHEMA, format_table
from bnconvert.walk import Norm, find_norms

if TYPE_CHECKING:
    from torch import Tensor, nn

HALF_MAX = torch.finfo(torch.float16).max

OUT_OF_SIGHT = "Calls of F.batch_norm inside a forward are not layers and are not listed."


@dataclass(frozen=True)
class InspectedLayer:
    """One BatchNorm-like layer.

    Attributes:
        name: First qualified name; "" is the model itself.
        names: All qualified names; more than one where the layer is shared.
        type: Class name.
        kind: What sort of BatchNorm it is, in words.
        channels: Number of channels; None where unknown.
        eps: Added to the variance; None where unknown.
        momentum: Weight of a batch in the running statistics; None is cumulative, unknown, or that
            of a frozen layer that has none.
        stats: "live", "frozen" or "none".
        affine: "trained", "frozen" or "none".
        dtype: dtype of the running statistics, or of the weight.
        group: Ranks that statistics are taken over, for synchronised layers.
    """

    name: str
    names: tuple[str, ...]
    type: str
    kind: str
    channels: int | None
    eps: float | None
    momentum: float | None
    stats: str
    affine: str
    dtype: str
    group: str


@dataclass(frozen=True)
class Finding:
    """Something suspicious about a layer.

    Attributes:
        name: Qualified name of the layer.
        text: What is so, as a sentence with the value.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect_batchnorm` found.

    Attributes:
        layers: Every BatchNorm-like layer, once.
        findings: What is suspicious, in the order of the layers.
    """

    layers: tuple[InspectedLayer, ...]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, ready for JSON."""
        return {
            "schema": SCHEMA,
            "layers": [asdict(layer) for layer in self.layers],
            "findings": [asdict(finding) for finding in self.findings],
            "note": OUT_OF_SIGHT,
        }

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} BatchNorm layers, {len(self.findings)} findings"]
        columns = ("name", "type", "channels", "eps", "momentum", "stats", "affine", "dtype")
        rows = [(*columns, "group"), *(_row(layer) for layer in self.layers)]
        lines += format_table(rows) if self.layers else []
        lines += _grouped(self.findings)
        return "\n".join([*lines, OUT_OF_SIGHT])


def _grouped(findings: tuple[Finding, ...]) -> list[str]:
    """Return one line per text, with the first layer and the number of the others."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        names.setdefault(finding.text, []).append(finding.name or "the model")
    return [
        f"finding: {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {text}"
        for text, found in names.items()
    ]


def _momentum(layer: InspectedLayer) -> str:
    if layer.momentum is not None:
        return f"{layer.momentum:g}"
    if layer.kind == Kind.FOREIGN_FROZEN.value:
        return "-"
    return "?" if layer.kind in (Kind.LAZY.value, Kind.UNKNOWN.value) else "cumulative"


def _row(layer: InspectedLayer) -> tuple[str, ...]:
    name = layer.name or "(the model)"
    if len(layer.names) > 1:
        name += f" (also {', '.join(layer.names[1:])})"
    return (
        name,
        layer.type,
        "?" if layer.channels is None else str(layer.channels),
        "?" if layer.eps is None else f"{layer.eps:g}",
        _momentum(layer),
        layer.stats,
        layer.affine,
        layer.dtype,
        layer.group or ("" if layer.kind == Kind.PLAIN.value else layer.kind),
    )


def inspect_batchnorm(model: nn.Module) -> Inspection:
    """List every BatchNorm-like layer of a model, of any library, and what is suspicious.

    Args:
        model: Any module; it is not changed.

    Raises:
        BnconvertError: The model is not a module.
    """
    norms = find_norms(model)
    findings = [
        Finding(norm.name, text) for norm in norms for text in _findings(norm, model.training)
    ]
    return Inspection(tuple(_inspect(norm) for norm in norms), tuple(findings))


def _inspect(norm: Norm) -> InspectedLayer:
    module = norm.module
    mean, weight = (_tensor(module, name) for name in ("running_mean", "weight"))
    known = next((t for t in (mean, weight) if t is not None), None)
    sized = known is not None and not torch.nn.parameter.is_lazy(known)
    channels = getattr(module, "num_features", None) or (
        known.numel() if sized and known is not None else None
    )
    return InspectedLayer(
        norm.name,
        norm.names,
        type(module).__name__,
        norm.kind.value,
        channels,
        getattr(module, "eps", None),
        getattr(module, "momentum", None),
        _stats(norm),
        _affine(module, weight, _tensor(module, "bias")),
        "none" if known is None else str(known.dtype).removeprefix("torch."),
        _group(norm),
    )


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value if isinstance(value, torch.Tensor) else None


def _stats(norm: Norm) -> str:
    if all(_tensor(norm.module, name) is None for name in ("running_mean", "running_var")):
        return "none"
    state = frozen_state(norm.module)
    frozen = norm.kind is Kind.FOREIGN_FROZEN or (state is not None and state.stats)
    return "frozen" if frozen else "live"


def _affine(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> str:
    tensors = [t for t in (weight, bias) if t is not None]
    if not tensors:
        return "none"
    return "trained" if any(t.requires_grad for t in tensors) else "frozen"


def _group(norm: Norm) -> str:
    if isinstance(norm.module, SyncMixin):
        return norm.module._bnconvert_group.describe()
    if norm.kind is Kind.FOREIGN_SYNC:
        known = foreign.describe(norm.module)
        return f"synchronised by {known.library}" if known else ""
    return ""


def _findings(norm: Norm, model_trains: bool) -> list[str]:
    module = norm.module
    texts = _freezing_findings(norm, model_trains)
    mean, var = _tensor(module, "running_mean"), _tensor(module, "running_var")
    if mean is None or var is None or mean.is_meta or torch.nn.parameter.is_lazy(mean):
        return texts
    if isinstance(module, SyncMixin) and module._bnconvert_group.lost:
        texts.append("its process group was lost in pickling; the default group is used")
    return [
        *texts,
        *_never_updated(module, mean, var),
        *_value_findings("running_mean", mean, [(~torch.isfinite(mean), "is not finite")]),
        *_value_findings("running_var", var, _variance_checks(var)),
        *(
            text
            for name in AFFINE
            if name not in not_parameters(module)
            and (tensor := _tensor(module, name)) is not None
            and not tensor.is_meta
            for text in _value_findings(name, tensor, [(~torch.isfinite(tensor), "is not finite")])
        ),
    ]


def _freezing_findings(norm: Norm, model_trains: bool) -> list[str]:
    module = norm.module
    texts = []
    if norm.kind in (Kind.PLAIN, Kind.SYNC) and frozen_state(module) is None:
        if getattr(module, "momentum", None) == 0:
            texts.append("momentum is 0: batch statistics still normalize in training")
        if getattr(module, "track_running_stats", True) is False:
            texts.append("track_running_stats is False: batch statistics normalize in training")
    if model_trains and not module.training and norm.kind in (Kind.PLAIN, Kind.SYNC):
        texts.append("is in eval mode inside a model in training mode; the next train() undoes it")
    return texts


def _never_updated(module: nn.Module, mean: Tensor, var: Tensor) -> list[str]:
    if bool((mean == 0).all()) and bool((var == 1).all()):
        return ["running statistics were never updated: mean 0 and variance 1 throughout"]
    batches = _tensor(module, "num_batches_tracked")
    if batches is not None and int(batches) == 0:
        return ["num_batches_tracked is 0 but the running statistics are not the initial ones"]
    return []


def _variance_checks(var: Tensor) -> list[tuple[Tensor, str]]:
    return [
        (~torch.isfinite(var), "is not finite"),
        (var < 0, "is negative"),
        (var == 0, "is zero"),
        (torch.isfinite(var) & (var.double() > HALF_MAX), "is beyond float16"),
    ]


def _value_findings(name: str, values: Tensor, checks: list[tuple[Tensor, str]]) -> list[str]:
    texts = []
    for mask, what in checks:
        count = int(mask.sum())
        if count:
            channel = int(mask.nonzero()[0])
            texts.append(
                f"{name} {what} in {count} of {values.numel()} channels, the first is channel "
                f"{channel} ({float(values.detach()[channel]):g})"
            )
    return texts
