"""One fold of one module tree: its graph, its groups of norms, its edits, and their proof."""

from __future__ import annotations

import contextlib
import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.errors import BnconvertError
from bnconvert.fold.capture import capture, run
from bnconvert.fold.float64 import in_float64
from bnconvert.fold.graph import FoldGraph, operation
from bnconvert.fold.mirror import mirror
from bnconvert.fold.norms import BatchCall, NormCall, find_norms
from bnconvert.fold.planner import Group, Planner
from bnconvert.fold.proof import (
    LIMIT,
    OtherSizeError,
    Proof,
    ReadsLayerError,
    failed_proof,
    first_difference,
    other_sizes,
    random_like,
    relative_difference,
    rounding_limit,
    run_folded,
)
from bnconvert.fold.report import count_ways, layer_report
from bnconvert.fold.search import Context
from bnconvert.fold.shared import separate_shared
from bnconvert.fold.topology import record
from bnconvert.fold.tree import TreeTarget
from bnconvert.layers.kinds import Kind
from bnconvert.report import LayerReport, Outcome
from bnconvert.walk import find_norms as find_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bnconvert.arguments import Arguments
    from bnconvert.fold.edits import Reparameterize, TreeEdit
    from bnconvert.plan import Undo
    from bnconvert.selection import Selection
    from bnconvert.walk import Norm


_IN_FLOAT64 = "; its proof in float64 cannot be made; verify=False (--no-verify) goes without it"
_UNFOLDABLE = {Kind.SCRIPTED, Kind.EXPORTED, Kind.LAZY, Kind.IN_PLACE}


class TreeFold:
    """One fold of one model: its graph, its groups of norms, and the edits."""

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        arguments: Arguments,
        *,
        clone_shared: bool = False,
        blocks: Sequence[Reparameterize] = (),
        kept: Mapping[str, str] = MappingProxyType({}),
        trusts_numbers: bool = True,
    ) -> None:
        self.model = model
        self._clone_shared = clone_shared
        self._kept = kept
        self.selection = selection
        self.arguments = arguments
        captured, inputs = model, arguments
        self._blocks = blocks
        self._separations: list[TreeEdit] = []
        if clone_shared:
            captured = mirror(model)
            self._separations = separate_shared(captured)
        elif blocks:  # in float64, so that what goes into a merged block is not rounded twice
            captured, inputs = mirror(model, torch.float64), arguments.to(torch.float64)
            for block in blocks:
                block.apply(captured)
        self.layers = find_layers(captured)
        forward = capture(captured, inputs)
        self.graph = FoldGraph(forward.program, forward.stored)
        self.graph.trusts_numbers = trusts_numbers
        self.target = TreeTarget(captured, self.graph)
        self.groups: dict[int, Group] = {}
        self.functions: list[LayerReport] = []
        self.edits: list[TreeEdit] = []
        calls, batch = find_norms(self.graph)
        for layer in self.layers:
            own = [call for call in calls if self.target.module_of(call.node) is layer.module]
            group = Group(own, layer.name, type(layer.module).__name__)
            group.refusal = self._refusal(layer, own, batch, selection)
            self.groups[id(layer.module)] = group
            if group.refusal:
                self.target.kept[id(layer.module)] = group.refusal
        self._note_functions(calls, batch)

    def again(self, kept: Mapping[str, str], *, trusts_numbers: bool) -> TreeFold:
        """Return a new start of the same fold.

        Args:
            kept: Why a norm stays as it is, by name.
            trusts_numbers: See `FoldGraph`.
        """
        return TreeFold(
            self.model,
            self.selection,
            self.arguments,
            clone_shared=self._clone_shared,
            kept=kept,
            trusts_numbers=trusts_numbers,
        )

    def _refusal(
        self, layer: Norm, calls: list[NormCall], batch: list[BatchCall], selection: Selection
    ) -> str:
        reason = selection.why_not(layer)
        if reason:
            return reason
        known = next((self._kept[name] for name in layer.names if name in self._kept), "")
        if known:
            return known
        if layer.kind in _UNFOLDABLE:
            return f"it is {layer.kind.value}"
        for call in batch:
            if self.target.module_of(call.node) is layer.module:
                return call.reason
        if not calls:
            if self.graph.hides(layer.name):
                return (
                    "it is called in an autocast block or another that folding does not look into"
                )
            if self.target.call_count(layer.module):
                return "its forward is no per-channel scale and shift with fixed values"
            return "the forward does not call it on the example inputs"
        return self.target.why_not_removable(layer.module, calls)

    def _note_functions(self, calls: list[NormCall], batch: list[BatchCall]) -> None:
        """Report calls of `F.batch_norm` outside any BatchNorm layer."""
        everything: list[NormCall | BatchCall] = [*calls, *batch]
        for call in everything:
            functional = isinstance(call, BatchCall) or not call.arithmetic
            if functional and id(self.target.module_of(call.node)) not in self.groups:
                owner = type(self.target.module_of(call.node)).__name__
                reason = f"it is a function called by {owner}, not a layer"
                if isinstance(call, NormCall):
                    reason += "; fold_exported can fold it"
                self.functions.append(
                    LayerReport(call.path, operation(call.node), Outcome.LEFT, reason=reason)
                )

    def plan(self, rewrite_activations: bool) -> None:
        """Fold in the graph and derive the edits of the tree."""
        context = Context(self.graph, self.target)
        planner = Planner(context, list(self.groups.values()), rewrite_activations)
        planner.run()
        folds = self.target.edits(planner, context.changed_sites())
        self.edits = [*self._separations, *self._blocks, *folds] if folds or self._blocks else []
        self._moved = self.target.modules_ending_in(planner.changed)

    @property
    def left(self) -> list[str]:
        """Names of the norms that might be folded and are left."""
        return [g.name for g in self.groups.values() if g.move is None and not g.refusal]

    @property
    def folded(self) -> list[str]:
        """Names of the norms that fold, in the order of the model."""
        return [group.name for group in self.groups.values() if group.move is not None]

    @property
    def kept(self) -> set[str]:
        """Names of the norms that must not change."""
        return {group.name for group in self.groups.values() if group.refusal}

    def ways(self) -> tuple[tuple[str, int], ...]:
        """Return how many norms went each way."""
        return count_ways(list(self.groups.values()))

    def entries(self) -> list[LayerReport]:
        """Return one entry per layer and name, in the order of the model."""
        entries = [
            layer_report(self.groups[id(layer.module)], name)
            for layer in self.layers
            for name in layer.names
        ]
        return entries + self.functions

    def prove(self, before: Any) -> Proof:
        """Try the edits on mirrors.

        Raises:
            VerificationError: The results differ.
        """
        if not self.edits:
            return Proof(0.0, 0.0)
        inputs = [self.arguments, random_like(self.arguments, seed=1)]
        wide = [argument.to(torch.float64) for argument in inputs]
        trial = mirror(self.model, torch.float64)
        with in_float64():
            originals = [run(trial, argument, _IN_FLOAT64) for argument in wide]
            for other in other_sizes(wide[1], doubled=self.graph.uses_numbers):
                with contextlib.suppress(BnconvertError):
                    originals.append(run(trial, other, _IN_FLOAT64))
                    wide.append(other)
            for edit in self.edits:
                edit.apply(trial)
            folded = [run_folded(trial, argument, _IN_FLOAT64) for argument in wide[: len(inputs)]]
            folded += [_run_other(trial, argument) for argument in wide[len(inputs) :]]
            differences = list(map(relative_difference, originals, folded))
            largest = max(differences)
            if not largest <= LIMIT:
                original = mirror(self.model, torch.float64)
                limit = rounding_limit(lambda inputs: run(original, inputs, _IN_FLOAT64), wide)
                if not largest <= limit:
                    where = first_difference(original, trial, wide[0], self._moved)
                    right = max(differences[: len(inputs)]) <= limit
                    raise failed_proof(largest, limit, where, right_at_example=right)
        del trial
        own = mirror(self.model)
        for edit in self.edits:
            edit.apply(own)
        return Proof(largest, relative_difference(before, run(own, self.arguments)))

    def plan_edits(self) -> list[functools.partial[Undo]]:
        """Return the edits of the model, the first of which checks that it is as planned."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        versions = [tensor._version for tensor in tensors]

        def unchanged() -> Undo:
            now = [*self.model.parameters(), *self.model.buffers()]
            same = [id(tensor) for tensor in now] == [id(tensor) for tensor in tensors]
            if not same or [tensor._version for tensor in now] != versions:
                raise BnconvertError(
                    "fold: the model's weights have changed since it was planned; make a new plan"
                )
            torch.clear_autocast_cache()  # an autocast block around this keeps weights it has cast
            return lambda: None

        if not self.edits:
            return []
        return [
            functools.partial(unchanged),
            *(functools.partial(_outside_inference, edit, self.model) for edit in self.edits),
            functools.partial(record, self.model, self.edits),
        ]


def _run_other(trial: nn.Module, arguments: Arguments) -> Any:
    """Run a folded model on inputs of another size, on which the original ran."""
    try:
        return run_folded(trial, arguments, _IN_FLOAT64)
    except ReadsLayerError:
        raise
    except BnconvertError as error:
        raise OtherSizeError(str(error)) from error


def _outside_inference(edit: TreeEdit, model: nn.Module) -> Undo:
    with torch.inference_mode(False):
        return edit.apply(model)
