"""What a BatchNorm layer must keep when its checkpoint is converted, and what is wrong with it.

`repair` goes through the layers of a checkpoint, mends what has one right answer, and reports what
has not. It reads only the tensors of these layers, which are short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint.names import LEAVES, batchnorm_layers
from bnconvert.checkpoint.record import Fact
from bnconvert.checkpoint.tensors import LazyTensor, dtype_name, from_tensor
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.checkpoint.record import Facts, Weights

ABN_EPS = 1e-5
COUNTER = "num_batches_tracked"


@dataclass
class LayerNotes:
    """What was done to one layer, and what was found and left.

    Attributes:
        done: Changes.
        kept: What stays as it is on purpose.
        found: Problems, each a sentence with the value that decided.
    """

    done: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


def repair(weights: Weights, *, abn: bool = False) -> dict[str, LayerNotes]:
    """Mend the BatchNorm layers of a checkpoint in place.

    Args:
        weights: Tensors and facts; the tensors are replaced by mended ones.
        abn: Turn the weights of InPlaceABN layers into those of BatchNorm, |w| + eps.

    Returns:
        Notes by layer name, for every layer with running statistics.

    Raises:
        CheckpointError: A counter holds what int64 cannot.
    """
    result = {}
    for layer in batchnorm_layers(weights.tensors):
        notes = result[layer] = LayerNotes()
        view = _Layer(layer, weights, notes)
        view.squeeze()
        view.complete_affine()
        view.counter()
        view.inplace_abn(abn)
        view.check()
        if _untouched(layer, weights):
            notes.found.append(
                "its statistics look untouched (mean 0, variance 1): the layer was never trained, "
                "or an average was taken of the parameters alone; recalibrate it"
            )
    return result


class _Layer:
    """One layer's tensors, read and replaced by leaf name."""

    def __init__(self, layer: str, weights: Weights, notes: LayerNotes) -> None:
        self.prefix = f"{layer}." if layer else ""
        self.tensors = weights.tensors
        self.facts: Facts = dict(weights.bn.get(layer, {}))
        if self.facts:
            weights.bn[layer] = self.facts
        self.version = weights.versions.get(layer, {}).get("version")
        self.notes = notes

    def get(self, leaf: str) -> LazyTensor | None:
        return self.tensors.get(self.prefix + leaf)

    def put(self, leaf: str, value: Tensor) -> None:
        name = self.prefix + leaf
        if name in self.tensors:
            self.tensors[name] = from_tensor(value)
        else:
            _insert(self.tensors, self.prefix, leaf, from_tensor(value))

    def fact(self, name: str, default: Any = None) -> Any:
        return self.facts[name].value if name in self.facts else default

    def squeeze(self) -> None:
        for leaf in LEAVES[:4]:
            tensor = self.get(leaf)
            if tensor is None or len(tensor.shape) < 2:
                continue
            if max(tensor.shape) == math.prod(tensor.shape):
                flat = (math.prod(tensor.shape),)
                self.tensors[self.prefix + leaf] = _reshaped(tensor, flat)
                self.notes.done.append(f"{leaf} of shape {list(tensor.shape)} squeezed")
            else:
                self.notes.found.append(f"{leaf} has shape {list(tensor.shape)}, not one axis")

    def complete_affine(self) -> None:
        weight, bias = self.get("weight"), self.get("bias")
        present = weight or bias
        if present is None or (weight is not None and bias is not None):
            return
        leaf, make = ("weight", torch.ones) if weight is None else ("bias", torch.zeros)
        self.put(leaf, make(present.shape, dtype=present.dtype))
        self.notes.done.append(f"{leaf} added, {'1' if leaf == 'weight' else '0'} everywhere")

    def counter(self) -> None:
        tensor = self.get(COUNTER)
        if tensor is not None:
            self._counter_dtype(tensor)
        elif "frozen" in str(self.fact("class", "")).lower() or self.version == 3:
            self.notes.kept.append(f"no {COUNTER}: the source says the layer is frozen")
        else:
            self.put(COUNTER, torch.zeros((), dtype=torch.int64))
            text = f"{COUNTER} added, 0 as int64"
            if "momentum" not in self.facts or self.fact("momentum") is None:
                text += " (with momentum=None the next training batch replaces the statistics)"
            self.notes.done.append(text)

    def _counter_dtype(self, tensor: LazyTensor) -> None:
        if tensor.dtype is torch.int64 and not tensor.shape:
            return
        value = tensor.load().reshape(-1)
        exact = value.numel() == 1 and bool(value.double().isfinite()) and value.item() % 1 == 0
        if not exact or abs(value.item()) >= 2**63:
            raise CheckpointError(
                f"{self.prefix}{COUNTER}: holds {value[:3].tolist()}, which is no count"
            )
        self.put(COUNTER, torch.tensor(int(value.item()), dtype=torch.int64))
        self.notes.done.append(
            f"{COUNTER} of {dtype_name(tensor.dtype)} and shape {list(tensor.shape)} stored as "
            "int64"
        )

    def inplace_abn(self, wanted: bool) -> None:
        weight = self.get("weight")
        if weight is None or not (wanted or self._is_abn()):
            return
        if not wanted:
            self.notes.found.append(
                "is an InPlaceABN layer, which scales by |weight| + eps; --abn stores that"
            )
            return
        eps = self.fact("eps", ABN_EPS)
        self.put("weight", (weight.load().double().abs() + eps).to(weight.dtype))
        self.notes.done.append(f"weight replaced by |weight| + {eps:g} (InPlaceABN)")
        if self.facts:
            self.facts["class"] = Fact("BatchNorm", "converted from InPlaceABN")

    def _is_abn(self) -> bool:
        return "abn" in str(self.fact("class", "")).rpartition(".")[2].lower()

    def check(self) -> None:
        variance, mean = self.get("running_var"), self.get("running_mean")
        if variance is not None and variance.dtype.is_floating_point:
            self._check_variance(variance.load().double())
        if mean is not None and mean.dtype.is_floating_point:
            bad = int((~mean.load().double().isfinite()).sum())
            if bad:
                self.notes.found.append(f"running_mean has {bad} values that are not finite")
        widths = {
            leaf: tensor.shape for leaf in LEAVES[:4] if (tensor := self.get(leaf)) is not None
        }
        if len(set(widths.values())) > 1:
            told = ", ".join(f"{leaf} {list(shape)}" for leaf, shape in widths.items())
            self.notes.found.append(f"its tensors have different widths ({told})")

    def _check_variance(self, variance: Tensor) -> None:
        for what, mask in (
            ("NaN", variance.isnan()),
            ("infinite", variance.isinf()),
            ("negative", variance < 0),
        ):
            count = int(mask.sum())
            if count:
                self.notes.found.append(f"running_var has {count} {what} values")
        finite = variance[variance.isfinite()]
        limit = torch.finfo(torch.float16).max
        large = int((finite > limit).sum())
        if large:
            self.notes.found.append(
                f"running_var has {large} values above {limit:g}, the largest of half precision "
                f"(up to {float(finite.max()):g})"
            )


def _untouched(layer: str, weights: Weights) -> bool:
    prefix = f"{layer}." if layer else ""
    mean, variance = (
        weights.tensors.get(prefix + leaf) for leaf in ("running_mean", "running_var")
    )
    if mean is None or variance is None or not math.prod(mean.shape):
        return False
    return not mean.load().any() and bool((variance.load() == 1).all())


def _reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    return replace(tensor, shape=shape, load=lambda: tensor.load().reshape(shape))


def _insert(tensors: dict[str, LazyTensor], prefix: str, leaf: str, value: LazyTensor) -> None:
    """Add a tensor where torch would have it: with its layer, in the order of `LEAVES`."""
    items = list(tensors.items())
    mine = [at for at, (name, _) in enumerate(items) if name in {prefix + n for n in LEAVES}]
    before = LEAVES[: LEAVES.index(leaf)]
    earlier = [at for at in mine if items[at][0].removeprefix(prefix) in before]
    at = earlier[-1] + 1 if earlier else mine[0]
    items.insert(at, (prefix + leaf, value))
    tensors.clear()
    tensors.update(items)
