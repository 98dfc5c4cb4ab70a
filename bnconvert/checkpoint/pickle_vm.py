"""A pickle interpreter that builds data and descriptions only; it cannot run anything.

Python's own unpickler imports what a file names and calls it. This one has a fixed table of calls
(`pickle_calls.CALLS`), all implemented here, and turns every other class into an inert
`Instance`. It records what a file asked for, so that a refusal can list all of it. Memory is
bounded by the length of the pickle: no instruction can reserve more than it brings.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import pickle_reader as argument
from bnconvert.checkpoint.pickle_calls import (
    CALLS,
    RefusedCallError,
    bad,
    hashable,
    new_instance,
    reconstruct,
)
from bnconvert.checkpoint.pickle_numpy import array_state, dtype_state
from bnconvert.checkpoint.pickle_references import LOAD_BYTES, REFERENCES
from bnconvert.checkpoint.pickle_values import (
    Global,
    Instance,
    NumpyArray,
    NumpyDtype,
    PickledDict,
    TensorNode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bnconvert.checkpoint.pickle_reader import PickleReader

MAX_INSTRUCTIONS = 30_000_000
MAX_COPIED = 30_000_000
"""Elements that calls may copy in all; a list can be named again and again in a few bytes."""

_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}
_MODULES = {
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
_MARK = object()
_SIZED = (list, tuple, dict, set, frozenset, str, bytes)


class PickleMachine:
    """Interprets one pickle.

    Args:
        reader: Where the instructions come from.
        persistent: Resolves persistent ids, which torch uses for storages.
        allow: Names admitted as inert stand-ins in addition to the fixed list.
        load_bytes: Reads a storage that was pickled as the bytes of a torch file.

    Attributes:
        unlisted: Names outside the fixed list that the pickle mentioned, in order.
        called: Those that it wanted to call.
    """

    def __init__(
        self,
        reader: PickleReader,
        persistent: Callable[[Any], Any] | None = None,
        allow: Iterable[str] = (),
        load_bytes: Callable[[Any], Any] | None = None,
    ) -> None:
        self.reader = reader
        self.persistent = persistent
        self.allow = frozenset(allow)
        self.load_bytes = load_bytes
        self.unlisted: dict[str, None] = {}
        self.called: dict[str, None] = {}
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.copied = 0

    def run(self) -> Any:
        """Return the pickled value.

        Raises:
            CheckpointError: The pickle is damaged.
        """
        reader = self.reader
        try:
            for _ in range(MAX_INSTRUCTIONS):
                code = reader.read(1)
                if code == b".":
                    return self.pop()
                step = _STEPS.get(code)
                if step is None:
                    raise bad(f"has the unknown instruction {code!r}")
                step(self)
        except (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            RecursionError,
            struct.error,
        ) as error:
            raise bad(f"cannot be followed ({type(error).__name__})") from error
        raise bad(f"has more than {MAX_INSTRUCTIONS} instructions")

    def pop(self) -> Any:
        """Take the topmost value; a mark is not one."""
        value = self.stack.pop()
        if value is _MARK:
            raise bad("uses a mark as a value")
        return value

    def top(self) -> Any:
        """Return the topmost value and leave it."""
        value = self.stack[-1]
        if value is _MARK:
            raise bad("uses a mark as a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Take all values above the last mark, and the mark."""
        stack = self.stack
        values: list[Any] = []
        while True:
            value = stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)

    def find(self, module: str, name: str) -> Any:
        """Return the name of a global, and note it where it is outside the fixed list."""
        module = _PYTHON2.get(module, module)
        full = f"{_MODULES.get(module, module)}.{name}"
        if full not in REFERENCES and not full.startswith("copyreg."):
            self.unlisted[full] = None
        return Global(full)

    def call(self, function: Any, args: Any) -> Any:
        """Make an allowed call; note any other one and go on with a stand-in."""
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise bad("calls something that is no function")
        name = function.name
        self.copied += sum(len(value) for value in args if isinstance(value, _SIZED))
        if self.copied > MAX_COPIED:
            raise bad("copies the same values over and over")
        if name == "copyreg._reconstructor":
            return reconstruct(*args)
        if name == "copyreg.__newobj__":
            return new_instance(args[0], args[1:])
        if name == LOAD_BYTES and self.load_bytes is not None:
            return self.load_bytes(args)
        if name in CALLS:
            with contextlib.suppress(RefusedCallError):
                return CALLS[name](*args)
        self.called[name] = None
        return Instance(name, args)


def _protocol(vm: PickleMachine) -> None:
    if vm.reader.read(1)[0] > 5:
        raise bad("has a protocol newer than 5")


def _frame(vm: PickleMachine) -> None:
    vm.reader.read(8)  # its length only helps readers that buffer


def _pop_mark(vm: PickleMachine) -> None:
    vm.pop_to_mark()


def _build(vm: PickleMachine) -> None:
    state = vm.pop()
    target = vm.top()
    if isinstance(target, (Instance, PickledDict)):
        target.state = state
    elif isinstance(target, NumpyArray):
        array_state(target, state)
    elif isinstance(target, NumpyDtype):
        dtype_state(target, state)
    elif not isinstance(target, TensorNode):
        raise bad("gives a state to a value that has none")


def _append(target: Any, values: list[Any]) -> None:
    if isinstance(target, Instance):
        target.elements.extend(values)
    elif isinstance(target, list):
        target.extend(values)
    else:
        raise bad("appends to something that is no list")


def _add_items(vm: PickleMachine) -> None:
    values = vm.pop_to_mark()
    target = vm.top()
    if isinstance(target, Instance):
        target.elements.extend(values)
    elif isinstance(target, set):
        target.update(hashable(value) for value in values)
    else:
        raise bad("adds to something that is no set")


def _set_items(target: Any, values: list[Any]) -> None:
    if isinstance(target, Instance):
        target = target.items
    if not isinstance(target, dict) or len(values) % 2:
        raise bad("fills something that is no dictionary")
    for key, value in zip(values[::2], values[1::2], strict=True):
        target[hashable(key)] = value


def _set_item(vm: PickleMachine) -> None:
    value, key = vm.pop(), vm.pop()
    _set_items(vm.top(), [key, value])


def _append_one(vm: PickleMachine) -> None:
    value = vm.pop()
    _append(vm.top(), [value])


def _appends(vm: PickleMachine) -> None:
    values = vm.pop_to_mark()
    _append(vm.top(), values)


def _set_many(vm: PickleMachine) -> None:
    values = vm.pop_to_mark()
    _set_items(vm.top(), values)


def _reduce(vm: PickleMachine) -> None:
    args, function = vm.pop(), vm.pop()
    vm.stack.append(vm.call(function, args))


def _newobj(vm: PickleMachine) -> None:
    args, cls = vm.pop(), vm.pop()
    vm.stack.append(new_instance(cls, args))


def _newobj_ex(vm: PickleMachine) -> None:
    _kwargs, args, cls = vm.pop(), vm.pop(), vm.pop()
    vm.stack.append(new_instance(cls, args))


def _inst(vm: PickleMachine) -> None:
    module, name = vm.reader.line().decode("utf-8"), vm.reader.line().decode("utf-8")
    args = tuple(vm.pop_to_mark())
    vm.stack.append(vm.call(vm.find(module, name), args))


def _obj(vm: PickleMachine) -> None:
    values = vm.pop_to_mark()
    vm.stack.append(vm.call(values[0], tuple(values[1:])))


def _global(vm: PickleMachine) -> None:
    module, name = vm.reader.line().decode("utf-8"), vm.reader.line().decode("utf-8")
    vm.stack.append(vm.find(module, name))


def _stack_global(vm: PickleMachine) -> None:
    name, module = vm.pop(), vm.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise bad("names a global by something other than text")
    vm.stack.append(vm.find(module, name))


def _persistent(vm: PickleMachine, identifier: Any) -> None:
    if vm.persistent is None:
        raise bad("refers to storages, which this kind of file does not hold")
    vm.stack.append(vm.persistent(identifier))


def _memoize(vm: PickleMachine) -> None:
    vm.memo[len(vm.memo)] = vm.top()


def _pop(vm: PickleMachine) -> None:
    vm.stack.pop()


def _put(number: Callable[[PickleReader], int]) -> Callable[[PickleMachine], None]:
    def step(vm: PickleMachine) -> None:
        vm.memo[number(vm.reader)] = vm.top()

    return step


def _get(number: Callable[[PickleReader], int]) -> Callable[[PickleMachine], None]:
    def step(vm: PickleMachine) -> None:
        vm.stack.append(vm.memo[number(vm.reader)])

    return step


def _tuple(count: int) -> Callable[[PickleMachine], tuple[Any, ...]]:
    def build(vm: PickleMachine) -> tuple[Any, ...]:
        return tuple([vm.pop() for _ in range(count)][::-1])

    return build


def _pushes(make: Callable[[PickleMachine], Any]) -> Callable[[PickleMachine], None]:
    def step(vm: PickleMachine) -> None:
        vm.stack.append(make(vm))

    return step


def _reads(make: Callable[[PickleReader], Any]) -> Callable[[PickleMachine], None]:
    def step(vm: PickleMachine) -> None:
        vm.stack.append(make(vm.reader))

    return step


def _dict_of(vm: PickleMachine) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    _set_items(result, vm.pop_to_mark())
    return result


def _frozen(vm: PickleMachine) -> frozenset[Any]:
    return frozenset(hashable(value) for value in vm.pop_to_mark())


_STEPS: dict[bytes, Callable[[PickleMachine], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": _pushes(lambda _: _MARK),
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _pushes(lambda vm: vm.top()),
    b"N": _pushes(lambda _: None),
    b"\x88": _pushes(lambda _: True),
    b"\x89": _pushes(lambda _: False),
    b"I": _reads(argument.int_line),
    b"J": _reads(argument.signed),
    b"K": _reads(argument.unsigned(1)),
    b"M": _reads(argument.unsigned(2)),
    b"L": _reads(argument.long_line),
    b"\x8a": _reads(argument.big(1)),
    b"\x8b": _reads(argument.big(4)),
    b"F": _reads(argument.float_line),
    b"G": _reads(argument.double),
    b"S": _reads(argument.quoted),
    b"T": _reads(argument.python2_text(4)),
    b"U": _reads(argument.python2_text(1)),
    b"V": _reads(argument.escaped_text),
    b"X": _reads(argument.text_argument(4)),
    b"\x8c": _reads(argument.text_argument(1)),
    b"\x8d": _reads(argument.text_argument(8)),
    b"B": _reads(argument.bytes_argument(4)),
    b"C": _reads(argument.bytes_argument(1)),
    b"\x8e": _reads(argument.bytes_argument(8)),
    b"\x96": _reads(argument.bytes_argument(8)),
    b"]": _pushes(lambda _: []),
    b"}": _pushes(lambda _: {}),
    b")": _pushes(lambda _: ()),
    b"\x8f": _pushes(lambda _: set()),
    b"l": _pushes(lambda vm: vm.pop_to_mark()),
    b"t": _pushes(lambda vm: tuple(vm.pop_to_mark())),
    b"d": _pushes(_dict_of),
    b"\x85": _pushes(_tuple(1)),
    b"\x86": _pushes(_tuple(2)),
    b"\x87": _pushes(_tuple(3)),
    b"\x91": _pushes(_frozen),
    b"a": _append_one,
    b"e": _appends,
    b"s": _set_item,
    b"u": _set_many,
    b"\x90": _add_items,
    b"b": _build,
    b"R": _reduce,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"c": _global,
    b"\x93": _stack_global,
    b"P": lambda vm: _persistent(vm, vm.reader.line().decode("ascii")),
    b"Q": lambda vm: _persistent(vm, vm.pop()),
    b"\x94": _memoize,
    b"p": _put(argument.line_number),
    b"q": _put(argument.unsigned(1)),
    b"r": _put(argument.unsigned(4)),
    b"g": _get(argument.line_number),
    b"h": _get(argument.unsigned(1)),
    b"j": _get(argument.unsigned(4)),
}
