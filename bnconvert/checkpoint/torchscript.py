"""TorchScript archives: weights from the data, eps from the text of the program, nothing run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.modules import MAX_DEPTH, MAX_MODULES, norm_facts
from bnconvert.checkpoint.pickle_values import Instance, as_lazy, is_tensor
from bnconvert.checkpoint.record import Fact, Weights
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from bnconvert.checkpoint.archive import Archive

MAX_CODE = 1 << 26
_CLASS = re.compile(r"^class (\w+)\(Module\):\n((?:[ \t].*\n?|\n)*)", re.MULTILINE)
_CONSTANT = re.compile(r"^  (eps|momentum|affine) : Final\[\w+\] = (\S+)$", re.MULTILINE)
_TENSORS = re.compile(r"^  __(?:parameters|buffers)__ = \[([^\]]*)\]", re.MULTILINE)
_CALL = re.compile(r"torch\.batch_norm\([^()]*, ([\d.e+-]+), ([\d.e+-]+), (?:True|False)\)")


def weights_of(root: Instance, archive: Archive) -> Weights:
    """Return the tensors of a script module and the facts of its norm layers.

    Args:
        root: The module, as `data.pkl` describes it.
        archive: For the text of its classes.

    Raises:
        CheckpointError: The module tree is endless.
    """
    code = _classes(archive)
    weights = Weights(layout="script module")
    pending: list[tuple[str, Instance, int]] = [("", root, 0)]
    for _ in range(MAX_MODULES):
        if not pending:
            return weights
        prefix, module, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise CheckpointError(f"modules are nested more than {MAX_DEPTH} deep; refused")
        text = code.get(module.type, "")
        attributes = module.attributes()
        listed = {n.strip(" \"'") for group in _TENSORS.findall(text) for n in group.split(",")}
        for name, value in attributes.items():
            if is_tensor(value) and (name in listed or not text):
                tensor = as_lazy(value)
                if tensor is not None:
                    weights.tensors[f"{prefix}{name}"] = tensor
        _facts(weights, prefix.rstrip("."), module.type, text)
        children = [(n, v) for n, v in attributes.items() if isinstance(v, Instance)]
        pending += [
            (f"{prefix}{name}.", child, depth + 1)
            for name, child in reversed(children)
            if child.type.startswith("__torch__")
        ]
    raise CheckpointError(f"more than {MAX_MODULES} modules are reachable; refused")


def _facts(weights: Weights, layer: str, type_name: str, text: str) -> None:
    values: dict[str, Any] = {key: _number(value) for key, value in _CONSTANT.findall(text)}
    call = _CALL.search(text)
    if call and "eps" not in values:
        values["eps"] = _number(call.group(2))
    name = type_name.replace("___torch_mangle", "")
    facts = norm_facts(type_name, values, "TorchScript code")
    if not facts and call and f"{layer}.running_var".lstrip(".") in weights.tensors:
        facts = {"class": Fact(name, "TorchScript code"), "eps": Fact(values["eps"], "code")}
    if facts:
        weights.bn[layer] = facts


def _number(text: str) -> Any:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    try:
        return float(text)
    except ValueError:
        return None


def _classes(archive: Archive) -> dict[str, str]:
    """Return the text of every class of the program by its qualified name."""
    found: dict[str, str] = {}
    total = 0
    for name in archive.names():
        _, slash, path = name.partition("/code/")
        if not slash or not path.endswith(".py"):
            continue
        text = archive.read(name, MAX_CODE).decode("utf-8", "replace")
        total += len(text)
        if total > MAX_CODE:
            raise CheckpointError("its program is larger than any genuine one; refused")
        module = path.removesuffix(".py").replace("/", ".")
        for class_name, body in _CLASS.findall(text):
            found[f"{module}.{class_name}"] = body
    return found
