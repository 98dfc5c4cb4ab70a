"""Translate a captured program to an ONNX graph, and clean it.

torch's translation is taken unoptimised. Its own optimiser would fuse BatchNormalization in
float32 and without a report; here the same public rewrite rules run without those.
"""

from __future__ import annotations

import ast
import itertools
import re
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import optimizer
from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules

from bnconvert import __version__
from bnconvert.capturing import quiet_log
from bnconvert.errors import BnconvertError, first_line
from bnconvert.export.capture import layer_of
from bnconvert.export.opset import NEWEST_TRANSLATED, OLDEST_TRANSLATED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.export import ExportedProgram

_RULES = (
    "add_0_rule",
    "sub_0_rule",
    "mul_by_1_rule",
    "div_by_1_rule",
    "dropout_inference_rule",
    "dropout_zero_rule",
    "one_reshape_matmul_reshape_rule",
    "two_reshapes_matmul_reshape_rule",
    "cast_constant_of_shape_rule",
    "cast_constant_of_shape_without_value_rule",
    "collapse_slice_rule",
    "collapse_slice2_rule",
    "materialize_reshape_shape_rule",
    "min_min_rule",
    "max_max_rule",
    "min_max_rule",
    "max_min_rule",
    "successive_clip_relu_rule",
    "successive_clip_rule",
    "successive_relu_clip_rule",
    "successive_relu_rule",
    "cast_cast_rule",
    "no_op_cast_rule",
    "no_op_expand_rule",
    "no_op_transpose_rule",
    "reshape_reshape_rule",
    "slice_split_rule",
    "squeeze_reshape_1d_rule",
    "transpose_transpose_rule",
    "unsqueeze_unsqueeze_rule",
    "no_op_dynamic_scatter_nd_rule",
    "no_op_static_scatter_nd_rule",
    "fuse_pad_into_conv_rule",
    "normalize_pad_format_conv_rule",
)

_SQRT_2 = 2.0**0.5
_AXIS_NAMES = {0: "batch", 2: "height", 3: "width"}
_GENERATED = re.compile(r"[^.]*_\d+")  # names that torch counts up, not names of weights
_UNTRANSLATED = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_FAILING = re.compile(r"Error when translating node .*target=([\w.]+)")
_WORD = re.compile(r"\w+")
_SCOPES = "pkg.torch.onnx.name_scopes"  # torch writes each node's module path there


def translate(program: ExportedProgram, opset: int, outputs: Sequence[str]) -> ir.Model:
    """Return the clean ONNX graph of a program.

    Args:
        program: What `torch.export` captured, in eval mode.
        opset: The wanted opset; the graph has it, or the nearest that torch translates to.
        outputs: Names to give the outputs.

    Raises:
        BnconvertError: An operation has no translation; the text names it.
    """
    try:
        with quiet_log("onnxscript.version_converter"):  # it prints a traceback and goes on
            onnx_program = torch.onnx.export(
                program,
                (),
                dynamo=True,
                optimize=False,
                opset_version=min(max(opset, OLDEST_TRANSLATED), NEWEST_TRANSLATED),
                verbose=False,
            )
    except Exception as error:
        raise BnconvertError(_why(error, program)) from error
    if onnx_program is None:
        raise BnconvertError("export: torch gave no ONNX program; update torch")
    model = onnx_program.model
    inputs = [value.name for value in model.graph.inputs]
    with quiet_log("onnx_ir"):  # it tells what it leaves as it is
        _clean(model)
    _rename(model, inputs, outputs)
    common.ClearMetadataAndDocStringPass()(model)
    return model


def _why(error: BaseException, program: ExportedProgram) -> str:
    """Return what the innermost error says, and which operation it is about, from where."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    innermost = chain[-1]
    unknown = _UNTRANSLATED.search(str(innermost))
    if unknown:
        name, problem = unknown[1], "has no translation to ONNX"
    else:
        failing = next((found for each in chain if (found := _FAILING.search(str(each)))), None)
        if failing is None:
            return f"export: torch's translation fails: {first_line(innermost)}"
        name = failing[1].removeprefix("torch.ops.")
        problem = f"is not translated to ONNX: {first_line(innermost)}"
    op = name.removesuffix(".default")
    for node in (*program.graph.nodes, *program.run_decompositions().graph.nodes):
        if str(node.target).startswith(op):
            places = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
            where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
            return f"{layer_of(node) or 'model'}: {op} {problem}{where}"
    return f"export: {op} {problem}"


def _clean(model: ir.Model) -> None:
    common.InlinePass()(model)
    rewrite = RewriteRuleSet(list(_rules()))
    for _ in range(2):  # a rewrite exposes constants, and folding those exposes rewrites
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        rewrite.apply_to_model(model)
        common.RemoveUnusedNodesPass()(model)
    for step in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]  # of onnx_ir
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
    ):
        step(model)


def _rules() -> Iterator[RewriteRule]:
    for name in _RULES:
        found = getattr(rules, name)
        yield from found if isinstance(found, (list, tuple)) else (found,)
    yield RewriteRule(_gelu, _gelu_as_runtimes_know_it)


def _gelu(op: Any, x: Any) -> Any:
    """Match the Gelu that torch writes below opset 20, `x * (0.5 * (1 + erf(x / sqrt(2))))`."""
    return op.Mul(x, op.Mul(0.5, op.Add(op.Erf(op.Div(x, _SQRT_2)), 1.0)))


def _gelu_as_runtimes_know_it(op: Any, x: Any) -> Any:
    """Return `(0.5 * x) * (1 + erf(x / sqrt(2)))`, the same bits, which onnxruntime fuses."""
    dtype = x.dtype or ir.DataType.FLOAT
    half, one, root = (
        op.Constant(value=ir.tensor(value, dtype=dtype)) for value in (0.5, 1.0, _SQRT_2)
    )
    return op.Mul(op.Mul(half, x), op.Add(op.Erf(op.Div(x, root)), one))


def _rename(model: ir.Model, inputs: Sequence[str | None], outputs: Sequence[str]) -> None:
    """Give nodes the name of their layer, and values and sizes names that do not vary."""
    graph = model.graph
    for values, names in ((graph.outputs, outputs), (graph.inputs, inputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    taken = {value.name or "" for value in graph.inputs} | set(outputs)
    for node in graph.all_nodes():
        node.name = _first_free(f"{_scope(node)}/{node.op_type}".lstrip("/"), taken)
        for index, value in enumerate(node.outputs):
            if not value.is_graph_output():
                value.name = _first_free(f"{node.name}_output_{index}", taken)
        for index, source in enumerate(node.inputs):
            if source is not None and _is_generated_constant(source):
                source.name = _first_free(f"{node.name}_input_{index}", taken)
    _rename_sizes(graph)
    graph.name = "main"
    model.producer_name, model.producer_version = "bnconvert", __version__


def _is_generated_constant(value: ir.Value) -> bool:
    if value.is_graph_output():
        return False
    return value.is_initializer() and bool(_GENERATED.fullmatch(value.name or ""))


def _rename_sizes(graph: ir.Graph) -> None:
    """Call the open dimensions batch, height and width, also inside expressions of them."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                names.setdefault(size.value, _AXIS_NAMES.get(axis, f"dim_{axis}"))
    for value in (*graph.inputs, *(out for node in graph.all_nodes() for out in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(size, names) for size in value.shape])


def _renamed(size: int | ir.SymbolicDim, names: dict[str, str]) -> int | ir.SymbolicDim:
    if isinstance(size, int) or size.value is None:
        return size
    return ir.SymbolicDim(_WORD.sub(lambda match: names.get(match[0], match[0]), size.value))


def _scope(node: ir.Node) -> str:
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "['', '']"))
    return str(scopes[-2]) if len(scopes) > 1 else ""


def _first_free(name: str, taken: set[str]) -> str:
    choices = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    free = next(choice for choice in choices if choice not in taken)
    taken.add(free)
    return free
