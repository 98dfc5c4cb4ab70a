"""CRC-32C (Castagnoli), which TensorFlow's files use, on many lanes at once.

A CRC is linear over GF(2): the data is cut into lanes of equal length, all advanced together by
numpy, and the lanes' results are combined by advancing each over the zeros that follow it.
"""

from __future__ import annotations

import numpy as np

POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_LANES_FROM = 4096
_PIECE = 1 << 22


def _table() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ POLYNOMIAL, values >> 1).astype(np.uint32)
    return values


_TABLE = _table()


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of some bytes, computed piece by piece so that memory stays small."""
    crc = 0xFFFFFFFF
    for start in range(0, len(data), _PIECE):
        crc = _advance(data[start : start + _PIECE], crc)
    return crc ^ 0xFFFFFFFF


def _advance(data: bytes | memoryview, crc: int) -> int:
    if len(data) < _LANES_FROM:
        return _tail(data, crc)
    lanes = 1 << ((len(data).bit_length() - 1) // 2)
    width = len(data) // lanes
    block = np.frombuffer(data, dtype=np.uint8, count=lanes * width).reshape(lanes, width)
    state = np.zeros(lanes, dtype=np.uint32)
    state[0] = crc
    for column in np.ascontiguousarray(block.T):
        state = _TABLE[(state ^ column) & 0xFF] ^ (state >> 8)
    shift = _zeros(width)
    crc = 0  # of what lies before the first lane, which has taken it over
    for lane in state.tolist():
        crc = _apply(shift, crc) ^ lane
    return _tail(data[lanes * width :], crc)


def masked(data: bytes | memoryview) -> int:
    """Return the CRC-32C as TensorFlow and LevelDB store it, rotated and offset."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _tail(data: bytes | memoryview, crc: int) -> int:
    table = _TABLE
    for byte in data:
        crc = int(table[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
    return crc


def _apply(matrix: list[int], vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


def _zeros(count: int) -> list[int]:
    """Return the matrix that advances a CRC over `count` zero bytes, by squaring."""
    step = [POLYNOMIAL, *(1 << bit for bit in range(31))]  # one zero bit
    for _ in range(3):
        step = [_apply(step, column) for column in step]  # two, four, eight bits
    result = [1 << bit for bit in range(32)]
    while count:
        if count & 1:
            result = [_apply(step, column) for column in result]
        step = [_apply(step, column) for column in step]
        count >>= 1
    return result
