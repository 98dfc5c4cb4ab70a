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
    return "?" if layer.kind in _UNSAID else "cumulative"


_UNSAID = (Kind.LAZY.value, Kind.UNKNOWN.value, Kind.SCRIPTED.value)
"""Kinds whose momentum is unknown where it is None."""


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
        _number(module, "eps"),
        _number(module, "momentum"),
        _stats(norm),
        _affine(module, weight, _tensor(module, "bias")),
        "none" if known is None else str(known.dtype).removeprefix("torch."),
        _group(norm),
    )


def _number(module: nn.Module, name: str) -> float | None:
    value = getattr(module, name, None)
    return None if value is None else float(value)


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
    if isinstance(module, SyncMixin) and module._bnconvert_group.lost:
        texts.append("its process group was lost in pickling; the default group is used")
    mean, var = _values(module, "running_mean"), _values(module, "running_var")
    if mean is not None and var is not None:
        texts += _never_updated(module, mean, var)
    affine = (_values(module, name) for name in AFFINE if name not in not_parameters(module))
    return texts + [
        text
        for values in (mean, var, *affine)
        if values is not None
        for text in _value_findings(values)
    ]


@dataclass(frozen=True)
class _Values:
    """The values of one tensor of a layer, as far as this rank has them.

    Attributes:
        name: Name of the tensor.
        flat: One value per channel, float64 or complex128.
        where: " of this rank's shard" where other ranks have the rest.
    """

    name: str
    flat: Tensor
    where: str


def _values(module: nn.Module, name: str) -> _Values | None:
    tensor = _tensor(module, name)
    if tensor is None or tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return None
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    where = "" if local.shape == tensor.shape else " of this rank's shard"
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    flat = local.detach().flatten().to(dtype)
    return _Values(name, flat, where) if flat.numel() else None


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


def _never_updated(module: nn.Module, mean: _Values, var: _Values) -> list[str]:
    if bool((mean.flat == 0).all()) and bool((var.flat == 1).all()):
        return ["running statistics were never updated: mean 0 and variance 1 throughout"]
    batches = _values(module, "num_batches_tracked")
    if batches is not None and bool((batches.flat == 0).all()):
        return ["num_batches_tracked is 0 but the running statistics are not the initial ones"]
    return []


def _value_findings(values: _Values) -> list[str]:
    texts = []
    for mask, what in _checks(values):
        count = int(mask.sum())
        if count:
            channel = int(mask.nonzero()[0])
            texts.append(
                f"{values.name} {what} in {count} of {mask.numel()} channels{values.where}, the "
                f"first is channel {channel} ({values.flat[channel].item():g})"
            )
    return texts


def _checks(values: _Values) -> list[tuple[Tensor, str]]:
    finite = torch.isfinite(values.flat)
    checks = [(~finite, "is not finite")]
    if values.name == "running_var" and not values.flat.is_complex():
        checks += [
            (values.flat < 0, "is negative"),
            (values.flat == 0, "is zero"),
            (finite & (values.flat > HALF_MAX), "is beyond float16"),
        ]
    return checks
