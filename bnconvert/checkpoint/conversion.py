"""`convert_checkpoint`: load, mend, cast, write, and report on every BatchNorm layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnconvert import __version__
from bnconvert.checkpoint import axes, batchnorm, casting
from bnconvert.checkpoint.epsilon import match_eps
from bnconvert.checkpoint.matching import fit
from bnconvert.checkpoint.names import LEAVES, layer_of
from bnconvert.checkpoint.outputs import Job, SourceHash
from bnconvert.checkpoint.reading import load_checkpoint
from bnconvert.checkpoint.saving import check_output, kind_of, write
from bnconvert.checkpoint.tensors import dtype_name
from bnconvert.errors import CheckpointError
from bnconvert.report import LayerReport, Outcome, Report

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    import torch
    from torch import nn

    from bnconvert.checkpoint.outputs import Progress
    from bnconvert.checkpoint.record import Checkpoint, Weights


@dataclass(frozen=True)
class Settings:
    """How to convert.

    Attributes:
        dtype: Floating dtype of everything but BatchNorm; None keeps what is stored.
        cast_norm: Cast BatchNorm too.
        eps: "from-file" or "from-model" where the two differ; None refuses then.
        abn: Turn InPlaceABN weights into those of BatchNorm.
    """

    dtype: torch.dtype | None = None
    cast_norm: bool = False
    eps: str | None = None
    abn: bool = False

    def __post_init__(self) -> None:
        if self.eps not in (None, "from-file", "from-model"):
            raise CheckpointError(f"eps is {self.eps!r}; choose 'from-file' or 'from-model'")


@dataclass
class ConversionPlan:
    """A conversion that is worked out and not yet written.

    Attributes:
        checkpoint: The source.
        weights: What will be written.
        report: What was done to each layer, and found.
        config: Configuration of the target model, for a model folder.
    """

    checkpoint: Checkpoint
    weights: Weights
    report: Report
    config: dict[str, Any] | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report, with the source and the notes on it."""
        return {
            **self.report.to_dict(),
            "source": str(self.checkpoint.path),
            "format": self.checkpoint.format,
            "layout": self.checkpoint.layout,
            "notes": list(self.weights.notes),
        }

    def __str__(self) -> str:
        return "\n".join([str(self.report), *(f"  note: {note}" for note in self.weights.notes)])


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    weights: str = "auto",
    prefix: str = "auto",
    allow_globals: Iterable[str] = (),
    dtype: str | torch.dtype | None = None,
    cast_norm: bool = False,
    eps: str | None = None,
    abn: bool = False,
    model: nn.Module | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    verify: bool = True,
    hash_source: bool = True,
) -> Report:
    """Convert a file of weights, keeping what BatchNorm needs, and prove the copy.

    Args:
        src: File, folder or index to read.
        dst: File or new folder to write.
        to: "safetensors", "torch", "sharded" or "folder"; by default the suffix of `dst` decides,
            and no suffix means "sharded".
        weights: "raw", "ema" or "auto"; see `load_checkpoint`.
        prefix: See `load_checkpoint`; with a `model`, "auto" chooses the prefix that fits it.
        allow_globals: See `load_checkpoint`.
        dtype: "fp16", "bf16" or "fp32" for floating tensors; BatchNorm is kept in float32 then.
        cast_norm: Cast BatchNorm too.
        eps: Where the eps in the file differs from the model's: "from-file" or "from-model".
        abn: Store |weight| + eps for InPlaceABN layers, which BatchNorm needs.
        model: Target whose names and shapes the result must have.
        max_shard_size: Bytes of a shard.
        overwrite: Replace an existing output file.
        verify: Read the result back and compare every byte with the source.
        hash_source: Keep the SHA-256 of the source in the result's metadata.

    Returns:
        What was done to each BatchNorm layer and each changed tensor, and what was found.

    Raises:
        CheckpointError: The source is refused, the output exists or cannot hold a value.
        VerificationError: The result read back differs; nothing was left.
    """
    settings = Settings(casting.parse_dtype(dtype), cast_norm, eps, abn)
    checkpoint = load_checkpoint(src, weights=weights, prefix=prefix, allow_globals=allow_globals)
    check_destination(checkpoint, Path(dst), to, max_shard_size, overwrite)
    plan = plan_conversion(checkpoint, settings, model)
    write_plan(
        plan,
        Path(dst),
        to=to,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        verify=verify,
        hash_source=hash_source,
    )
    return plan.report


def check_destination(
    checkpoint: Checkpoint, dst: Path, to: str | None, max_shard_size: int | None, overwrite: bool
) -> None:
    """Refuse an output before any work is done; arguments as for `convert_checkpoint`.

    Raises:
        CheckpointError: It exists, is the input itself, or its suffix names no format.
    """
    check_output(dst, kind_of(dst, to, max_shard_size), overwrite, checkpoint.weights())


def write_plan(
    plan: ConversionPlan,
    dst: Path,
    *,
    to: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    verify: bool = True,
    hash_source: bool = True,
    progress: Progress = lambda _: None,
) -> None:
    """Write a planned conversion; arguments as for `convert_checkpoint`.

    Args:
        plan: From `plan_conversion`.
        dst: File or new folder.
        to: Kind of output.
        max_shard_size: Bytes of a shard.
        overwrite: Replace an existing file.
        verify: Read the result back.
        hash_source: Keep the source's SHA-256.
        progress: Called with the number of bytes of each tensor that was written.
    """
    files = list(plan.checkpoint.files)
    kind = kind_of(dst, to, max_shard_size)
    check_output(dst, kind, overwrite, plan.weights)
    job = Job(
        plan.weights,
        provenance=_provenance(plan),
        verify=verify,
        sha256=SourceHash(files) if hash_source and files else None,
        progress=progress,
    )
    write(job, dst, kind, max_shard_size, overwrite, plan.config)
    for file in files:
        file.unchanged()


def _provenance(plan: ConversionPlan) -> dict[str, Any]:
    changed = [layer for layer in plan.report.layers if layer.outcome is Outcome.REWRITTEN]
    return {
        "by": f"bnconvert {__version__}",
        "source": plan.checkpoint.path.name,
        "format": plan.checkpoint.format,
        "layout": plan.checkpoint.layout,
        "notes": list(plan.weights.notes),
        "changes": {layer.name: layer.now for layer in changed},
    }


def plan_conversion(
    checkpoint: Checkpoint, settings: Settings, model: nn.Module | None = None
) -> ConversionPlan:
    """Work out a conversion without writing anything.

    Args:
        checkpoint: The source.
        settings: How to convert.
        model: Target whose names and shapes the result must have.

    Raises:
        CheckpointError: The checkpoint does not fit the model, or its eps differs and `settings`
            do not say which counts.
    """
    if settings.eps and model is None:
        raise CheckpointError(f"eps {settings.eps!r} needs a model to compare with; give --model")
    weights = checkpoint.weights()
    changes: dict[str, list[str]] = {}
    axes.order_axes(weights, changes)
    if model is not None:
        fit(checkpoint.path, weights, model)
        for layer, text in match_eps(checkpoint.path, weights, model, settings.eps).items():
            changes.setdefault(layer, []).append(text)
    layers = batchnorm.repair(weights, abn=settings.abn)
    _cast(weights, layers, settings, changes)
    rows = [*_layer_rows(weights, layers), *_tensor_rows(checkpoint, changes, layers)]
    config = _config(model)
    weights.architecture = (config or {}).get("architecture") or weights.architecture
    return ConversionPlan(checkpoint, weights, Report("checkpoint", tuple(rows)), config)


def _cast(
    weights: Weights,
    layers: dict[str, batchnorm.LayerNotes],
    settings: Settings,
    changes: dict[str, list[str]],
) -> None:
    if settings.dtype is None:
        return
    import torch

    for name, tensor in weights.tensors.items():
        layer, leaf = layer_of(name)
        norm = layer in layers and leaf in LEAVES
        target = torch.float32 if norm and not settings.cast_norm else settings.dtype
        new = casting.cast(name, tensor, target)
        if new is tensor:
            continue
        weights.tensors[name] = new
        text = f"{dtype_name(tensor.dtype)} -> {dtype_name(target)}"
        if norm:
            layers[layer].done.append(f"{leaf} {text}")
        else:
            changes.setdefault(name, []).append(text)


def _layer_rows(weights: Weights, layers: dict[str, batchnorm.LayerNotes]) -> Iterable[LayerReport]:
    for layer, notes in layers.items():
        facts = weights.bn.get(layer, {})
        eps = facts.get("eps")
        kind = str(facts["class"].value).rpartition(".")[2] if "class" in facts else "BatchNorm"
        known = f"eps {eps.value:g} ({eps.source})" if eps else "eps not in the file"
        if notes.done:
            text = "; ".join([*notes.done, known])
            yield LayerReport(layer, kind, Outcome.REWRITTEN, text)
        elif not notes.found:
            text = "; ".join(["copied", *notes.kept, known])
            yield LayerReport(layer, kind, Outcome.CONVERTED, text)
        for finding in notes.found:
            yield LayerReport(layer, kind, Outcome.LEFT, reason=finding)


def _tensor_rows(
    checkpoint: Checkpoint,
    changes: dict[str, list[str]],
    layers: dict[str, batchnorm.LayerNotes],
) -> Iterable[LayerReport]:
    for name, texts in changes.items():
        kind = "BatchNorm" if name in layers else "tensor"
        yield LayerReport(name, kind, Outcome.REWRITTEN, "; ".join(texts))


def _config(model: nn.Module | None) -> dict[str, Any] | None:
    """Return timm's configuration of a model, as its model folders have it."""
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict) or not config.get("architecture"):
        return None
    simple = (int, float, str, bool, list, tuple)
    keys = ("num_classes", "num_features", "global_pool")
    extra = {key: getattr(model, key, None) for key in keys}
    own = {key: value for key, value in extra.items() if isinstance(value, simple)}
    plain = {key: value for key, value in config.items() if isinstance(value, simple)}
    return {"architecture": config["architecture"], **own, "pretrained_cfg": plain}
