"""`fold_exported`: folding in an exported program, where every call stands for itself."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from bnconvert.arguments import Arguments
from bnconvert.errors import BnconvertError, first_line
from bnconvert.fold.capture import run as run_module
from bnconvert.fold.graph import FoldGraph
from bnconvert.fold.interpret import run_in_float64, user_inputs
from bnconvert.fold.merge import merge_branches
from bnconvert.fold.norms import find_norms, path_of
from bnconvert.fold.planner import Group, Planner
from bnconvert.fold.proof import (
    LIMIT,
    Proof,
    failed_proof,
    random_like,
    relative_difference,
    rounding_limit,
)
from bnconvert.fold.rebuild import drop_unused, rebuild, set_affine, set_weights
from bnconvert.fold.report import FoldReport, count_ways, layer_report
from bnconvert.fold.search import Context
from bnconvert.report import LayerReport, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from bnconvert.fold.norms import BatchCall, NormCall
    from bnconvert.fold.sites import Site


class GraphTarget:
    """Allows everything: in a graph, each call has weights of its own and nothing else looks on."""

    def check_site(self, site: Site) -> None:
        """Allow."""

    def check_norm(self, call: NormCall) -> None:
        """Allow."""

    def check_activation(self, node: fx.Node) -> None:
        """Allow."""

    def check_edge(self, producer: fx.Node, reader: fx.Node) -> None:
        """Allow."""

    def check_removal(self, call: NormCall) -> None:
        """Allow."""

    def note_removal(self, call: NormCall) -> None:
        """Nothing to note."""


class ExportedPlan:
    """The report of a fold of an exported program, and the folded program.

    Attributes:
        report: What becomes of each norm.
        ways: Which way each folded norm goes, by name: "backward", "forward", "split" or "merged".
    """

    def __init__(
        self, program: ExportedProgram, report: FoldReport, ways: Mapping[str, str]
    ) -> None:
        self.report = report
        self.ways = ways
        self._program = program

    def apply(self) -> ExportedProgram:
        """Return the folded program; the original is not changed."""
        return self._program

    def __str__(self) -> str:
        return str(self.report)


def fold_exported(
    exported_program: ExportedProgram, *, rewrite_activations: bool = True, verify: bool = True
) -> ExportedProgram:
    """Return a program in which every norm that can be folded exactly is folded.

    Beyond `fold_batchnorm`, calls of `F.batch_norm` and of activation functions, norms written as
    arithmetic, and modules called several times are folded as well, because every call has weights
    of its own in a graph.

    Args:
        exported_program: The program, exported from a model in eval mode; not changed.
        rewrite_activations: Let ReLU, ReLU6, Hardtanh and clamps become per-channel clamps.
        verify: Compare the folded with the original graph in float64, and refuse if they differ.

    Raises:
        BnconvertError: The argument is no exported program, or a channel's scale or shift is not
            finite or overflows.
        VerificationError: The folded program differs.
    """
    return plan_fold_exported(
        exported_program, rewrite_activations=rewrite_activations, verify=verify
    ).apply()


def plan_fold_exported(
    exported_program: ExportedProgram, *, rewrite_activations: bool = True, verify: bool = True
) -> ExportedPlan:
    """Return the folded program with its report; arguments and errors as for `fold_exported`."""
    if not isinstance(exported_program, ExportedProgram):
        raise BnconvertError(
            f"fold: expected an ExportedProgram, got {type(exported_program).__name__}; use "
            "fold_batchnorm for a module"
        )
    graph = FoldGraph(exported_program)
    calls, batch = find_norms(graph)
    groups = [Group([call], call.path or call.node.name, call.type) for call in calls]
    context = Context(graph, GraphTarget())
    planner = Planner(context, groups, rewrite_activations)
    planner.run()
    while merged := merge_branches(context):
        for branch in merged:
            for call in branch.norms:
                planner.note_merged(call, branch.node)
        planner.run()
    for site in context.changed_sites():
        set_weights(graph, site)
    for group in groups:
        if group.move is None and group.calls[0].changed:
            set_affine(graph, group.calls[0])
    drop_unused(graph)
    folded = rebuild(graph)
    proof = _prove(graph, folded, planner.changed) if verify else None
    entries = [layer_report(group, group.name) for group in groups]
    entries += [_left(call) for call in batch]
    report = FoldReport("fold", tuple(dict.fromkeys(entries)), proof, count_ways(groups))
    ways = {group.name: group.how for group in groups if group.move is not None}
    return ExportedPlan(folded, report, ways)


def _left(call: BatchCall) -> LayerReport:
    name = call.path or call.node.name
    return LayerReport(name, call.type, Outcome.LEFT, reason=call.reason)


def _prove(graph: FoldGraph, folded: ExportedProgram, moved: set[fx.Node]) -> Proof:
    program = graph.program
    original = FoldGraph(program)
    given = Arguments(tuple(user_inputs(program)), {}).to(torch.float64)
    inputs = [given, random_like(given, seed=1)]

    def run(graph: FoldGraph, arguments: Arguments) -> Any:
        try:
            return run_in_float64(graph, list(arguments.map(torch.clone).args))
        except NotImplementedError as error:  # an operator without float64, torch.cond
            raise BnconvertError(
                f"fold: its proof in float64 cannot be made: {first_line(error)}; verify=False "
                "goes without it"
            ) from error

    largest = max(relative_difference(run(original, one), run(graph, one)) for one in inputs)
    if not largest <= LIMIT:
        limit = rounding_limit(functools.partial(run, original), inputs)
        if not largest <= limit:
            where = _first_difference(original, graph, list(given.args), moved)
            raise failed_proof(largest, limit, where)
    if program.example_inputs is None:
        return Proof(largest, None)
    example = Arguments(*program.example_inputs)
    before, after = (run_module(each.module(), example) for each in (program, folded))
    return Proof(largest, relative_difference(before, after))


def _first_difference(
    original: FoldGraph, graph: FoldGraph, inputs: list[Any], moved: set[fx.Node]
) -> str:
    """Return the first operation whose value differs, but for those that a right fold changes."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    run_in_float64(original, inputs, before)
    run_in_float64(graph, inputs, after)
    passed_over = {node.name for node in moved}
    for node in original.graph.nodes:
        same = node.name in before and node.name in after and node.name not in passed_over
        if same and not relative_difference(before[node.name], after[node.name]) <= LIMIT:
            return path_of(node) or str(node.name)
    return ""
