"""The calls by which pickles hold numpy arrays, types and numbers, built here as descriptions."""

from __future__ import annotations

from typing import Any

from bnconvert.checkpoint.pickle_calls import allowed, bad, sizes
from bnconvert.checkpoint.pickle_values import Instance, NumpyArray, NumpyDtype, bytes_of

MENTIONED = ("numpy.ndarray",)
"""Names that these pickles mention without calling them."""


@allowed("numpy.dtype")
def _dtype(code: Any, *_: Any) -> NumpyDtype:
    code = code.decode("latin1") if isinstance(code, bytes) else code
    if not isinstance(code, str):
        raise bad("names a numpy type by something other than text")
    return NumpyDtype(code.lstrip("<>=|"), code.startswith(">"))


@allowed("numpy._core.multiarray._reconstruct")
def _reconstruct(*_: Any) -> NumpyArray:
    return NumpyArray()


@allowed("numpy._core.numeric._frombuffer")
def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> NumpyArray:
    if not isinstance(dtype, NumpyDtype):
        raise bad("builds an array without a type")
    return NumpyArray(sizes(shape), dtype, order == "F", bytes_of(data))


@allowed("numpy._core.multiarray.scalar")
def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, NumpyDtype):
        raise bad("builds a number without a type")
    if isinstance(data, Instance):
        return data
    return NumpyArray((), dtype, False, bytes_of(data))


def array_state(array: NumpyArray, state: Any) -> None:
    """Fill in an array from what numpy stores as its state."""
    if not isinstance(state, tuple) or len(state) < 4:
        raise bad("gives an array a state that is not one")
    shape, dtype, fortran, data = state[-4:]
    if not isinstance(dtype, NumpyDtype):
        raise bad("builds an array without a type")
    array.shape, array.dtype, array.fortran = sizes(shape), dtype, bool(fortran)
    array.data = None if isinstance(data, list) else bytes_of(data)


def dtype_state(dtype: NumpyDtype, state: Any) -> None:
    """Fill in the byte order of a numpy dtype."""
    if not isinstance(state, tuple) or len(state) < 2:
        raise bad("gives a numpy type a state that is not one")
    dtype.big_endian = state[1] in (">", b">")
