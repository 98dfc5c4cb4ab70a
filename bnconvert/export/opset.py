"""Give a graph the opset that was asked for, or refuse; never another one."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes import common

from bnconvert.errors import BnconvertError, first_line
from bnconvert.export.onnx_constants import add_initializer, constant_array

DEFAULT_OPSET = 18
_OLDEST = 7
"""The oldest that onnxruntime runs."""

_SOFTMAX_OF_ONE_AXIS = 13
"""The opset in which Softmax came to normalise along one axis."""

_EMPTY = np.zeros(0, np.float32)

_FREE_INITIALIZERS = 4
"""The oldest version of the file format in which initializers need not be inputs as well."""

OLDEST_TRANSLATED = 18
"""The oldest opset that torch translates to; older ones are reached by converting from it."""

NEWEST_TRANSLATED = 25
"""The newest that every graph is translated to; newer ones are reached by converting from it."""


def check_opset(opset: int | None) -> int:
    """Return the opset to write.

    Raises:
        BnconvertError: It is not an opset of the installed onnx.
    """
    if opset is None:
        return DEFAULT_OPSET
    newest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or not _OLDEST <= opset <= newest:
        raise BnconvertError(
            f"opset: {opset!r} is not known to onnx {onnx.__version__} and onnxruntime; choose one "
            f"from {_OLDEST} to {newest}"
        )
    return opset


def to_opset(model: ir.Model, opset: int) -> ir.Model:
    """Return the graph in an opset, with the file format version of the same release of onnx.

    Raises:
        BnconvertError: An operation of the graph cannot be expressed in it.
    """
    current = model.opset_imports[""]
    if opset > current:
        model = _raised(model, opset)
    elif opset < current:
        model = _lowered(model, opset)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    oldest = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    model.ir_version = max(oldest, _FREE_INITIALIZERS)
    return model


def _raised(model: ir.Model, opset: int) -> ir.Model:
    current = model.opset_imports[""]
    try:
        return _converted(model, opset)
    except Exception as error:  # the converter raises whatever its adapters raise
        raise _refusal(opset, error, f"{current} or lower") from error


def _lowered(model: ir.Model, opset: int) -> ir.Model:
    """Go down as far as onnx's converter goes, and on where a lower number is all it takes.

    Many operators got a new version only to allow more types, which the converter does not know
    the way back of. The checker sees whether a node is valid in the older one, and the proof that
    every export ends with whether it still means the same.
    """
    for step in range(model.opset_imports[""] - 1, opset - 1, -1):
        try:
            model = _one_lower(model, step)
        except Exception as error:  # noqa: PERF203 (the text says how far it went)
            raise _refusal(opset, error, f"{step + 1} or higher") from error
    return model


def _one_lower(model: ir.Model, opset: int) -> ir.Model:
    if opset < _SOFTMAX_OF_ONE_AXIS <= model.opset_imports[""]:
        _normalise_last_axes(model)
    try:
        return _converted(model, opset)
    except Exception as error:  # as in `_raised`
        try:
            return _relabelled(model, opset)
        except Exception:  # the converter's reason is the clearer one
            raise error from None


def _refusal(opset: int, error: Exception, choice: str) -> BnconvertError:
    reason = first_line(error).rpartition("failed: ")[2].rstrip(".")
    return BnconvertError(
        f"opset: the graph cannot be expressed in opset {opset} ({reason}); choose {choice}"
    )


def _converted(model: ir.Model, opset: int) -> ir.Model:
    if opset < model.opset_imports[""]:
        _drop_new_attributes(model, opset)
    proto = version_converter.convert_version(ir.serde.serialize_model(model), opset)
    return _checked(proto)


def _relabelled(model: ir.Model, opset: int) -> ir.Model:
    _spell_out(model, opset)
    _drop_new_attributes(model, opset)
    _inputs_to_attributes(model, opset)
    _fill_inputs(model, opset)
    proto = ir.serde.serialize_model(model)
    next(entry for entry in proto.opset_import if not entry.domain).version = opset
    return _checked(proto)


def _checked(proto: onnx.ModelProto) -> ir.Model:
    onnx.checker.check_model(proto, full_check=True)
    return ir.serde.deserialize_model(proto)


def _drop_new_attributes(model: ir.Model, opset: int) -> None:
    """Remove attributes that the older operator does not have and that make no difference.

    onnx's converter would copy them, and the checker then refuses the file.
    """
    for node in model.graph.all_nodes():
        if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            continue
        older = onnx.defs.get_schema(node.op_type, opset)
        known = older.attributes
        current = onnx.defs.get_schema(node.op_type, model.opset_imports[""]).attributes
        for name in [name for name in node.attributes if name not in known]:
            default = current[name].default_value
            stated = default.type and ir.serde.deserialize_attribute(default)
            if stated == node.attributes[name] or (name == "allowzero" and _has_no_zero(node)):
                node.attributes.pop(name)
        if node.op_type == "Split" and "num_outputs" not in known and len(older.inputs) > 1:
            _split_by_sizes(model, node)


def _normalise_last_axes(model: ir.Model) -> None:
    """Let each Softmax work on the last axis, where its older versions mean the same.

    Those normalise over all axes from the given one on; neither converter nor checker sees it.
    """
    for node in list(model.graph.all_nodes()):
        if node.domain or node.op_type not in {"Softmax", "LogSoftmax", "Hardmax"}:
            continue
        source, result = node.inputs[0], node.outputs[0]
        name = node.name or result.name
        if node.graph is not model.graph or source is None or source.shape is None:
            raise BnconvertError(f"{node.op_type} {name} is in a branch, or of unknown rank")
        rank = len(source.shape)
        axis = (node.attributes["axis"].as_int() if "axis" in node.attributes else -1) % rank
        node.attributes["axis"] = ir.AttrInt64("axis", rank - 1)
        if axis == rank - 1:
            continue
        perm = [*(each for each in range(rank) if each != axis), axis]
        shape = ir.Shape([source.shape[each] for each in perm])
        before = _transpose(source, perm, f"{name}_last", shape)
        model.graph.insert_before(node, before)
        node.replace_input_with(0, before.outputs[0])
        inner = ir.Value(name=f"{name}_normalised", type=result.type, shape=shape)
        back = [perm.index(each) for each in range(rank)]
        after = _transpose(inner, back, result.name or "", result.shape)
        result.replace_all_uses_with(after.outputs[0], replace_graph_outputs=True)
        result.name = inner.name
        result.shape = shape
        after.replace_input_with(0, result)
        model.graph.insert_after(node, after)


def _transpose(source: ir.Value, perm: list[int], name: str, shape: ir.Shape | None) -> ir.Node:
    result = ir.Value(name=name, type=source.type, shape=shape)
    attributes = [ir.AttrInt64s("perm", perm)]
    return ir.Node(
        "", "Transpose", [source], attributes, outputs=[result], name=f"{name}/Transpose"
    )


def _fill_inputs(model: ir.Model, opset: int) -> None:
    """Give a Resize the empty inputs that its older version wants where the newer wants none."""
    for node in model.graph.all_nodes():
        if node.domain or node.op_type != "Resize":
            continue
        formals = onnx.defs.get_schema("Resize", opset).inputs
        for index, source in enumerate(node.inputs):
            if (
                source is None
                and formals[index].option == onnx.defs.OpSchema.FormalParameterOption.Single
            ):
                empty = add_initializer(model.graph, f"{node.name}_{formals[index].name}", _EMPTY)
                node.replace_input_with(index, empty)


def _spell_out(model: ir.Model, opset: int) -> None:
    """Put operators that the older opset lacks as what onnx defines them to be."""
    for node in model.graph.all_nodes():
        if node.domain or onnx.defs.has(node.op_type, max_inclusive_version=opset):
            continue
        schema = onnx.defs.get_schema(node.op_type, model.opset_imports[""])
        if schema.has_function:
            body = ir.serde.deserialize_function(schema.function_body)
            model.functions[body.identifier()] = body
    if model.functions:
        common.InlinePass()(model)


def _inputs_to_attributes(model: ir.Model, opset: int) -> None:
    """Write constants as the attributes of the same name that the older operators have instead."""
    for node in model.graph.all_nodes():
        if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            continue
        older = onnx.defs.get_schema(node.op_type, opset)
        current = onnx.defs.get_schema(node.op_type, model.opset_imports[""])
        for index, formal in enumerate(current.inputs[: len(node.inputs)]):
            given = node.inputs[index]
            if index < len(older.inputs) or formal.name not in older.attributes or given is None:
                continue
            tensor = ir.convenience.get_const_tensor(given)
            if tensor is not None and not given.is_graph_input():
                kind = ir.AttributeType(int(older.attributes[formal.name].type))
                value = tensor.numpy().tolist()
                node.attributes[formal.name] = ir.Attr(formal.name, kind, value)
                node.replace_input_with(index, None)
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
    common.RemoveUnusedNodesPass()(model)


def _has_no_zero(reshape: ir.Node) -> bool:
    shape = constant_array(reshape.inputs[1])
    return shape is not None and bool(shape.all())


def _split_by_sizes(model: ir.Model, node: ir.Node) -> None:
    """Write the sizes of an even split as its second input, as before opset 18."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    sizes = [None if out.shape is None else out.shape[axis] for out in node.outputs]
    if len(node.inputs) > 1 or not all(isinstance(size, int) for size in sizes):
        return
    node.attributes.pop("num_outputs", None)
    value = add_initializer(model.graph, f"{node.name}_sizes", np.array(sizes, np.int64))
    node.resize_inputs(2)
    node.replace_input_with(1, value)
