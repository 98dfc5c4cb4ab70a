"""The calls that a pickle may make, each built here from plain data.

The table is the whole of what is allowed. Every function receives the call's arguments as
described by `bnconvert.checkpoint.pickle_values`, checks them, and returns data; none of the
names in the table is ever imported or called.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import torch

from bnconvert.checkpoint.pickle_values import (
    Global,
    Instance,
    PickledDict,
    Storage,
    TensorNode,
)
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[..., Any]

CALLS: dict[str, Call] = {}

DESCRIBED = (
    "argparse.Namespace",
    "fastcore.foundation.L",
    "mmengine.logging.history_buffer.HistoryBuffer",
)
"""Classes whose instances genuine training files of timm, fastai and mmengine hold."""


class RefusedCallError(Exception):
    """An allowed name is called with what it may not be called with."""


MAX_DIMENSIONS = 64
LARGEST_KEY = (1 << 61) - 1
"""Python hashes integers modulo this."""


def allowed(*names: str) -> Callable[[Call], Call]:
    """Enter a function into the table under the names of what it stands for."""

    def enter(function: Call) -> Call:
        CALLS.update(dict.fromkeys(names, function))
        return function

    return enter


def bad(what: str) -> CheckpointError:
    """Return the error for arguments that no genuine file has."""
    return CheckpointError(f"the pickle {what}; the file is damaged")


def sizes(value: Any) -> tuple[int, ...]:
    """Return a shape or stride; anything but a short tuple of integers is damage."""
    if isinstance(value, Instance) and value.type == "torch.Size":
        value = value.args[0] if value.args else ()
    if (
        not isinstance(value, (tuple, list))
        or len(value) > MAX_DIMENSIONS
        or not all(type(size) is int for size in value)
    ):
        raise bad("gives a tensor a shape that is not one")
    return tuple(value)


@allowed("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")
def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> TensorNode:
    if not isinstance(storage, Storage) or type(offset) is not int:
        raise bad("builds a tensor without a storage")
    return TensorNode(storage, storage.dtype, offset, sizes(size), sizes(stride))


@allowed("torch._utils._rebuild_tensor_v3")
def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorNode:
    node: TensorNode = _tensor(storage, offset, size, stride)
    node.dtype = _torch_dtype(dtype)
    return node


@allowed("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
def _parameter(data: Any, *_: Any) -> Any:
    if isinstance(data, TensorNode):
        data.parameter = True
    return data


@allowed("torch.nn.parameter.Parameter", "torch.nn.Parameter")
def _parameter_class(data: Any = None, *_: Any) -> Any:
    return _parameter(data)


@allowed("torch._tensor._rebuild_from_type_v2")
def _from_type(function: Any, _type: Any, args: Any, _state: Any = None) -> Any:
    call = CALLS.get(function.name) if isinstance(function, Global) else None
    if call is None or not function.name.startswith("torch._utils._rebuild"):
        raise bad("rebuilds a tensor by something other than torch's own functions")
    if not isinstance(args, tuple):
        raise bad("rebuilds a tensor without arguments")
    return call(*args)


def _without_values(kind: str) -> Call:
    def build(*_: Any) -> TensorNode:
        return TensorNode(None, None, 0, (), (), kind)

    return build


for _name, _kind in {
    "_rebuild_qtensor": "quantized tensor",
    "_rebuild_sparse_tensor": "sparse tensor",
    "_rebuild_sparse_csr_tensor": "sparse tensor",
    "_rebuild_meta_tensor_no_storage": "meta tensor",
    "_rebuild_nested_tensor": "nested tensor",
    "_rebuild_wrapper_subclass": "tensor of a subclass",
    "_rebuild_device_tensor_from_numpy": "device tensor",
    "_rebuild_device_tensor_from_cpu_tensor": "device tensor",
}.items():
    CALLS[f"torch._utils.{_name}"] = _without_values(_kind)


@allowed("torch.serialization._get_layout", "torch._utils._get_layout")
def _layout(name: Any) -> Instance:
    return Instance("torch.layout", (name,))


@allowed("torch.Size")
def _size(value: Any = ()) -> tuple[int, ...]:
    return sizes(value)


@allowed("collections.OrderedDict", "builtins.dict")
def _ordered_dict(pairs: Any = ()) -> PickledDict:
    items = pairs.items() if isinstance(pairs, dict) else pairs
    result = PickledDict()
    for pair in items:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise bad("fills a dictionary with something other than pairs")
        result[hashable(pair[0])] = pair[1]
    return result


@allowed("collections.defaultdict")
def _default_dict(_factory: Any = None, pairs: Any = ()) -> PickledDict:
    result: PickledDict = _ordered_dict(pairs)
    return result


@allowed("collections.Counter")
def _counter(pairs: Any = ()) -> PickledDict:
    result: PickledDict = _ordered_dict(pairs)
    return result


@allowed("builtins.set", "builtins.frozenset")
def _set(values: Any = ()) -> set[Any]:
    if not isinstance(values, (list, tuple, set)):
        raise bad("builds a set of something other than a list")
    return {hashable(value) for value in values}


@allowed("builtins.list", "collections.deque")
def _list(values: Any = (), *_: Any) -> list[Any]:
    if not isinstance(values, (list, tuple, set)):
        raise bad("builds a list of something other than a list")
    return list(values)


@allowed(
    "torch.jit._pickle.build_intlist",
    "torch.jit._pickle.build_doublelist",
    "torch.jit._pickle.build_boollist",
    "torch.jit._pickle.build_tensorlist",
    "torch.jit._pickle.restore_type_tag",
)
def _script_list(values: Any, *_: Any) -> Any:
    return values


@allowed("builtins.getattr")
def _getattr(owner: Any, name: Any) -> Global:
    """Name a method of a class that is only ever described; any other getattr is refused."""
    if not isinstance(owner, Global) or owner.name not in DESCRIBED or not isinstance(name, str):
        raise RefusedCallError
    return Global(f"{owner.name}.{name}")


@allowed("builtins.tuple")
def _tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(_list(values))


@allowed("builtins.bytearray", "builtins.bytes")
def _bytes(value: Any = b"", encoding: Any = None) -> bytes:
    if isinstance(value, str) and encoding in ("latin-1", "latin1"):
        return value.encode("latin1", "replace")
    if isinstance(value, (list, tuple)) and all(type(v) is int and 0 <= v < 256 for v in value):
        return bytes(value)
    if not isinstance(value, (bytes, bytearray)):
        raise bad("builds bytes of something else")
    return bytes(value)


@allowed("_codecs.encode")
def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or codecs.lookup(str(encoding)).name != "iso8859-1":
        raise bad("encodes text as something other than latin1")
    return text.encode("latin1", "replace")


def _inert(name: str) -> Call:
    def build(*args: Any) -> Instance:
        return Instance(name, args)

    return build


INERT_CALLS = (
    "builtins.complex",
    "builtins.range",
    "builtins.slice",
    "datetime.date",
    "datetime.datetime",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "fractions.Fraction",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib.WindowsPath",
    "pathlib._local.Path",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "torch.device",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata.StorageType",
    "uuid.UUID",
)
"""Plain values with no effect: recorded, and read only where a format needs them."""

for _name in INERT_CALLS:
    CALLS[_name] = _inert(_name)


TORCH_DTYPES = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "QInt8": torch.qint8,
    "QUInt8": torch.quint8,
    "QInt32": torch.qint32,
    "Untyped": torch.uint8,
}
STORAGE_TYPES = {
    f"{module}.{name}Storage": dtype
    for name, dtype in STORAGES.items()
    for module in ("torch", "torch.cuda", "torch.storage")
}


def _torch_dtype(value: Any) -> torch.dtype:
    dtype = TORCH_DTYPES.get(value.name) if isinstance(value, Global) else None
    if dtype is None:
        raise bad("gives a tensor a type that is not one")
    return dtype


def hashable(key: Any) -> Any:
    """Return a dictionary key; one that cannot be hashed, or is nested deeply, is damage."""
    pending, budget = [key], 256
    while pending:
        value = pending.pop()
        budget -= 1
        if isinstance(value, tuple):
            pending.extend(value[:256])
        unhashable = isinstance(value, (dict, list, set, bytearray))
        if budget < 0 or unhashable or _may_collide(value):
            raise bad("uses something as a dictionary key that cannot be one")
    return key


def _may_collide(value: Any) -> bool:
    """Return whether a number is so large that many of its kind have one hash, which is slow."""
    return isinstance(value, (int, float)) and not abs(value) < LARGEST_KEY


def new_instance(cls: Any, args: Any) -> Any:
    """Return what an object made without a call becomes."""
    if not isinstance(cls, Global) or not isinstance(args, tuple):
        raise bad("makes an object of something that is no class")
    if cls.name in ("collections.OrderedDict", "collections.defaultdict", "collections.Counter"):
        return PickledDict()
    return Instance(cls.name, args)


def reconstruct(cls: Any, base: Any = None, state: Any = None) -> Instance:
    """Return what `copyreg._reconstructor` stands for: an object made without a call."""
    instance: Instance = new_instance(cls, ())
    if isinstance(state, dict):
        instance.items.update(state)
    elif isinstance(state, list):
        instance.elements.extend(state)
    elif base is not None and state is not None:
        instance.args = (state,)
    return instance
