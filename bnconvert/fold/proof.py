"""Comparing a model before and after folding: outputs, and where they first differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bnconvert.arguments import Arguments, output_tensors
from bnconvert.errors import BnconvertError, VerificationError
from bnconvert.fold.capture import run
from bnconvert.probe import untouched

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 1e-9
"""Largest relative difference in float64 that a fold may make."""

_BATCHES = (1, 5)
_ROUNDINGS = 100.0
_SIGNAL_DIMS = 3
_LARGEST_LIMIT = 1e-6


@dataclass(frozen=True)
class Proof:
    """How far a folded model is from the original.

    Attributes:
        float64: Largest relative difference with everything computed in float64.
        own_dtype: The same in the model's own dtype; None where it cannot run there.
    """

    float64: float
    own_dtype: float | None


def relative_difference(before: Any, after: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest value of each tensor.

    Outputs that are not finite in the same places count as equal there; a mismatch in structure,
    shape or finiteness is an infinite difference.
    """
    tensors, others = output_tensors(before), output_tensors(after)
    if len(tensors) != len(others):
        return float("inf")
    return max(map(_difference, tensors, others), default=0.0)


def _difference(before: Tensor, after: Tensor) -> float:
    if before.shape != after.shape:
        return float("inf")
    if not before.is_floating_point():
        return 0.0 if torch.equal(before, after) else float("inf")
    one, two = before.detach().double(), after.detach().double()
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()) or not torch.equal(
        one[~finite].nan_to_num(nan=1.0), two[~finite].nan_to_num(nan=1.0)
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = (one[finite] - two[finite]).abs().max().item()
    largest = one[finite].abs().max().item()
    return difference / largest if largest else difference


def random_like(arguments: Arguments, seed: int) -> Arguments:
    """Return arguments whose floating point tensors are normal random values of the same spread."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        spread = tensor.double().std(correction=0).nan_to_num().cpu() if tensor.numel() else 1.0
        return (noise * (spread or 1.0)).to(tensor.device, tensor.dtype)

    return arguments.map(draw)


def other_sizes(arguments: Arguments, *, doubled: bool) -> list[Arguments]:
    """Return random arguments of other batch sizes, and of images or signals of another size.

    Args:
        arguments: Of the size of the example.
        doubled: Also return images of twice the size, which more models take than those that are
            one larger. Dimensions of size 1 stay; they are none of an image.
    """
    batch = arguments.batch
    others = [arguments.with_batch(size) for size in _BATCHES if batch not in (None, size)]
    single = arguments if batch is None else arguments.with_batch(1)

    def larger(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.ndim < _SIGNAL_DIMS:
            return tensor
        return F.pad(tensor, [edge for size in tensor.shape[:1:-1] for edge in (0, int(size > 1))])

    def double(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.ndim < _SIGNAL_DIMS:
            return tensor
        return tensor.repeat(1, 1, *(1 + (size > 1) for size in tensor.shape[2:]))

    others.append(random_like(single.map(larger), seed=2))
    return [*others, random_like(single.map(double), seed=3)] if doubled else others


class OtherSizeError(VerificationError):
    """The folded model is right at the size of the example and wrong at another."""


class ReadsLayerError(BnconvertError):
    """The forward reads an attribute of a layer that folding took away."""

    def __init__(self, text: str, name: str, attribute: str) -> None:
        super().__init__(text)
        self.name = name
        self.attribute = attribute


def run_folded(folded: nn.Module, arguments: Arguments, advice: str) -> Any:
    """Run a folded model.

    Raises:
        ReadsLayerError: It misses an attribute of a layer.
        BnconvertError: It does not run for another reason.
    """
    try:
        return run(folded, arguments, advice)
    except BnconvertError as error:
        cause = error.__cause__
        names = {id(module): name for name, module in folded.named_modules()}
        if isinstance(cause, AttributeError) and id(cause.obj) in names:
            raise ReadsLayerError(str(error), names[id(cause.obj)], str(cause.name)) from cause
        raise


def rounding_limit(run: Callable[[Arguments], Any], inputs: list[Arguments]) -> float:
    """Return what a fold may change in a model that magnifies rounding, at least `LIMIT`.

    That is a hundred times what the last bit of its inputs changes in the original, 1e-6 at most.

    Args:
        run: Runs the original in float64.
        inputs: What it was compared on, in float64.
    """
    changed = (relative_difference(run(one), run(_last_bit_changed(one))) for one in inputs)
    return min(max(LIMIT, _ROUNDINGS * max(changed)), _LARGEST_LIMIT)


def _last_bit_changed(arguments: Arguments) -> Arguments:
    generator = torch.Generator().manual_seed(2)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        up = torch.randint(2, tensor.shape, generator=generator).to(tensor.device)
        return torch.nextafter(tensor, torch.where(up == 1, math.inf, -math.inf).to(tensor))

    return arguments.map(change)


def failed_proof(
    largest: float, limit: float, where: str, *, right_at_example: bool = False
) -> VerificationError:
    """Return the error for a folded model whose outputs differ.

    Args:
        largest: The largest relative difference.
        limit: What is allowed.
        where: Name of the first layer whose output differs; "" if it is not known.
        right_at_example: Whether they do so at other sizes than the example's only.
    """
    if right_at_example:
        return OtherSizeError(
            f"fold: in float64 the folded model differs from the original by {largest:.3g} on "
            "inputs of another size than the example's, as its forward takes another path there; "
            "nothing was changed"
        )
    first = f"; the first layer to differ is {where}" if where else ""
    return VerificationError(
        f"fold: in float64 the folded model differs from the original by {largest:.3g} relative to "
        f"the largest value, where {limit:.3g} is allowed{first}; nothing was changed"
    )


def first_difference(
    original: nn.Module, folded: nn.Module, arguments: Arguments, moved: set[str]
) -> str:
    """Return the name of the first module, in the order of calls, whose output differs.

    Args:
        original: The model before.
        folded: The model after, a mirror of it with edits.
        arguments: What to call both with.
        moved: Names of modules whose output a right fold changes; they are passed over.
    """
    before = _outputs_by_call(original, arguments)
    after = dict(_outputs_by_call(folded, arguments))
    for call, output in before:
        name, _ = call
        if name in moved or call not in after:
            continue
        if not relative_difference(output, after[call]) <= LIMIT:
            return name or "the model itself"
    return ""


def _outputs_by_call(model: nn.Module, arguments: Arguments) -> list[tuple[tuple[str, int], Any]]:
    """Return what each call of each module returned, in the order in which the calls ended."""
    outputs: list[tuple[tuple[str, int], Any]] = []
    counts: dict[str, int] = {}

    def note(name: str, output: Any) -> None:
        number = counts[name] = counts.get(name, -1) + 1
        copies = pytree.tree_map_only(Tensor, torch.clone, output)
        outputs.append(((name, number), copies))

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    own = arguments.map(torch.clone)
    try:
        with untouched(model):
            model(*own.args, **own.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs
