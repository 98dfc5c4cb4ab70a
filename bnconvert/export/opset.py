"""Give a graph the opset that was asked for, or refuse; never another one."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import version_converter

from bnconvert.errors import BnconvertError, first_line

DEFAULT_OPSET = 18
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
    if not isinstance(opset, int) or not 1 <= opset <= newest:
        raise BnconvertError(
            f"opset: {opset!r} is not known to onnx {onnx.__version__}; choose one up to {newest}"
        )
    return opset


def to_opset(model: ir.Model, opset: int) -> ir.Model:
    """Return the graph in an opset, with the file format version of the same release of onnx.

    Raises:
        BnconvertError: An operation of the graph cannot be expressed in it.
    """
    current = model.opset_imports[""]
    if opset != current:
        if opset < current:
            _drop_new_attributes(model, opset)
        model = _converted(model, current, opset)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    model.ir_version = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    return model


def _converted(model: ir.Model, current: int, opset: int) -> ir.Model:
    proto = ir.serde.serialize_model(model)
    try:
        converted = version_converter.convert_version(proto, opset)
        onnx.checker.check_model(converted, full_check=True)
    except Exception as error:  # the converter raises whatever its adapters raise
        reason = first_line(error).rpartition("failed: ")[2]
        choice = f"{current} or higher" if opset < current else f"{current} or lower"
        raise BnconvertError(
            f"opset: the graph cannot be expressed in opset {opset} ({reason}); choose {choice}"
        ) from error
    return ir.serde.deserialize_model(converted)


def _drop_new_attributes(model: ir.Model, opset: int) -> None:
    """Remove attributes that the older operator does not have and that only state the default.

    onnx's converter would copy them, and the checker then refuses the file.
    """
    for node in model.graph.all_nodes():
        if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            continue
        known = onnx.defs.get_schema(node.op_type, opset).attributes
        current = onnx.defs.get_schema(node.op_type, model.opset_imports[""]).attributes
        for name in [name for name in node.attributes if name not in known]:
            default = current[name].default_value
            if default.type and ir.serde.deserialize_attribute(default) == node.attributes[name]:
                node.attributes.pop(name)
        if node.op_type == "Split" and "num_outputs" not in known:
            _split_by_sizes(model, node)


def _split_by_sizes(model: ir.Model, node: ir.Node) -> None:
    """Write the sizes of an even split as its second input, as before opset 18."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    sizes = [None if out.shape is None else out.shape[axis] for out in node.outputs]
    if len(node.inputs) > 1 or not all(isinstance(size, int) for size in sizes):
        return
    node.attributes.pop("num_outputs", None)
    value = ir.Value(
        name=f"{node.name}_sizes", const_value=ir.tensor(sizes, dtype=ir.DataType.INT64)
    )
    value.const_value.name = value.name  # type: ignore[union-attr]
    model.graph.register_initializer(value)
    node.resize_inputs(2)
    node.replace_input_with(1, value)
