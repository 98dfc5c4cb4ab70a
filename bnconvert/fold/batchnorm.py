"""`fold_batchnorm`: folding on the user's own module tree, with proof."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from bnconvert.errors import BnconvertError, VerificationError
from bnconvert.fold.capture import (
    arguments_for,
    refuse_exported,
    refuse_training_mode,
    refuse_uninitialized,
    run,
)
from bnconvert.fold.proof import OtherSizeError, Proof, ReadsLayerError
from bnconvert.fold.reparameterize import find_blocks
from bnconvert.fold.report import FoldReport
from bnconvert.fold.tree_fold import TreeFold
from bnconvert.forwarding import unwrap, without_compilation
from bnconvert.plan import Plan
from bnconvert.report import LayerReport, Outcome
from bnconvert.selection import Patterns, Selection
from bnconvert.walk import find_norms as find_layers

if TYPE_CHECKING:
    from bnconvert.fold.edits import Reparameterize

ModelT = TypeVar("ModelT", bound=nn.Module)

_OTHER_PATH = "the forward reads something else where inputs have another size"
_MOST_FOUND = 4
"""Norms that are looked for one by one; if that is not enough, every norm is left."""


def fold_batchnorm(
    model: ModelT,
    example_inputs: Any,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    clone_shared: bool = False,
    rewrite_activations: bool = True,
    verify: bool = True,
) -> ModelT:
    """Fold every BatchNorm that can be folded exactly, in place.

    Args:
        model: The model, in eval mode.
        example_inputs: A tensor, a tuple of positional or a dict of keyword arguments.
        include: Fold only layers that match: fnmatch patterns on qualified names, or a predicate.
        exclude: Leave layers that match.
        clone_shared: Give each name of a module that stands under several its own copy.
        rewrite_activations: Let ReLU, ReLU6 and Hardtanh become per-channel clamps where a
            BatchNorm before them can then go into the layers after them.
        verify: Compare the folded with the original model in float64, and refuse if they differ.

    Returns:
        The same model.

    Raises:
        BnconvertError: The model is in training mode, does not run on the inputs, cannot be
            captured, `include` matches no layer, or a layer's scale or shift is not finite; the
            model is as it was.
        VerificationError: The folded model differs; the model is as it was.
    """
    return plan_fold_batchnorm(
        model,
        example_inputs,
        include=include,
        exclude=exclude,
        clone_shared=clone_shared,
        rewrite_activations=rewrite_activations,
        verify=verify,
    ).apply()


def plan_fold_batchnorm(
    model: ModelT,
    example_inputs: Any,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    clone_shared: bool = False,
    rewrite_activations: bool = True,
    verify: bool = True,
) -> Plan[ModelT]:
    """Return what `fold_batchnorm` would do, proof included; arguments and errors are the same."""
    find_layers(model)  # refuses what is no module
    inner = unwrap(model)
    refuse_exported(inner)
    refuse_training_mode(inner)
    refuse_uninitialized(inner)
    selection = Selection(include, exclude)
    selection.refuse_idle(find_layers(inner))
    with torch.inference_mode(False), without_compilation(inner):
        arguments = arguments_for(inner, example_inputs)
        before = run(inner, arguments)
        folding = TreeFold(inner, selection, arguments, clone_shared=clone_shared)
        folding.plan(rewrite_activations)
        may_merge = verify and not clone_shared
        blocks = find_blocks(inner, folding.left, folding.kept) if may_merge else []
        merged = _merge_blocks(folding, blocks, rewrite_activations, before) if blocks else None
        if merged is not None:
            return Plan(model, merged[1], merged[0].plan_edits())
        proof = None
        if verify:
            folding, proof = _proved(folding, rewrite_activations, before)
    report = FoldReport("fold", tuple(folding.entries()), proof, folding.ways())
    return Plan(model, report, folding.plan_edits())


def _proved(folding: TreeFold, rewrite_activations: bool, before: Any) -> tuple[TreeFold, Proof]:
    """Return a fold with its proof: the one given, or one that leaves what stands in its way.

    A graph does not show that the forward reads an attribute of a layer, that a number in it was
    the size of the example, nor which path the forward takes at another size.

    Raises:
        VerificationError: The results differ, whatever is left.
    """
    kept: dict[str, str] = {}
    trusts_numbers = True
    while True:
        try:
            return folding, folding.prove(before)
        except ReadsLayerError as error:
            if error.name in kept:
                raise
            kept[error.name] = f"the forward reads its {error.attribute}"
        except VerificationError as error:
            if trusts_numbers and folding.graph.uses_numbers:
                trusts_numbers = False
            elif isinstance(error, OtherSizeError) and folding.folded:
                if list(kept.values()).count(_OTHER_PATH) < _MOST_FOUND:
                    kept[_culprit(folding, kept, rewrite_activations, before)] = _OTHER_PATH
                else:
                    kept.update(dict.fromkeys(folding.folded, _OTHER_PATH))
            else:
                raise
        folding = folding.again(kept, trusts_numbers=trusts_numbers)
        folding.plan(rewrite_activations)


def _culprit(
    folding: TreeFold, kept: dict[str, str], rewrite_activations: bool, before: Any
) -> str:
    """Return a norm without whose fold, and that of those before it, other sizes are right."""
    names = folding.folded

    def is_right(count: int) -> bool:
        fewer = folding.again(
            {**kept, **dict.fromkeys(names[:count], _OTHER_PATH)},
            trusts_numbers=folding.graph.trusts_numbers,
        )
        fewer.plan(rewrite_activations)
        try:
            fewer.prove(before)
        except BnconvertError:
            return False
        return True

    wrong, right = 0, len(names)
    while right - wrong > 1:
        middle = (wrong + right) // 2
        if is_right(middle):
            right = middle
        else:
            wrong = middle
    return names[right - 1]


def _merge_blocks(
    plain: TreeFold, blocks: list[Reparameterize], rewrite_activations: bool, before: Any
) -> tuple[TreeFold, FoldReport] | None:
    """Fold a model whose blocks merge their branches first.

    Returns None when a block's method fails, or the proof does.
    """
    try:
        folding = TreeFold(plain.model, plain.selection, plain.arguments, blocks=blocks)
        folding.plan(rewrite_activations)
        proof = folding.prove(before)
    except Exception:  # a method of another library may raise anything; the plain fold remains
        return None
    own = folding.entries()
    entries = _join(plain.entries(), own, blocks)
    ways = (*folding.ways(), ("reparameterized", len(entries) - len(own)))
    return folding, FoldReport("fold", tuple(entries), proof, ways)


def _join(
    plain: list[LayerReport], merged: list[LayerReport], blocks: list[Reparameterize]
) -> list[LayerReport]:
    """Return the entries after merging, with those of norms that went into a block in place."""
    known = {entry.name: entry for entry in merged}
    entries = []
    for entry in plain:
        block = next((b for b in blocks if entry.name.startswith(f"{b.name}.")), None)
        if entry.name in known or block is None:
            entries.append(known.get(entry.name, entry))
        else:
            now = f"with its branches into {block.name}, by its own method {block.method}"
            entries.append(replace(entry, outcome=Outcome.FOLDED, now=now, reason=""))
    return entries
