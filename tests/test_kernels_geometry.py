"""How launches divide tensors: each vector once, whatever the sizes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bnconvert.kernels.geometry import MAX_THREADS, Extent, divide

extents = st.builds(
    lambda rows, vectors, spatial, last, width: Extent(
        rows,
        vectors * width if last else vectors,
        1 if last else spatial * width,
        last,
        width,
    ),
    rows=st.integers(0, 40),
    vectors=st.integers(1, 90),
    spatial=st.integers(1, 30),
    last=st.booleans(),
    width=st.sampled_from([1, 2, 4, 8]),
)


def walk(extent: Extent, tile: int, split: int, x: int, y: int, multiprocessors: int) -> list[int]:
    """Return the offsets that a thread reads, computed as `position.cuh` does."""
    geometry = divide(extent, multiprocessors)
    channels, image, spatial, step, wrap, vectors, positions, iterations, remainder = struct.unpack(
        "5q4i", geometry.packed
    )
    first = split * geometry.block[1] + y
    count = iterations + (first < remainder)
    if extent.channels_last:
        channel = (tile * geometry.block[0] + x) * extent.width
        offset, within = first * image + channel, 0
        count = count if channel < channels else 0
    else:
        number, within = divmod(first, vectors)
        offset = number * image + tile * spatial + within * extent.width
    offsets = []
    for _ in range(count):
        offsets.append(offset)
        offset += step
        if not extent.channels_last:
            within += positions
            if within >= vectors:
                within -= vectors
                offset += wrap
    return offsets


@settings(deadline=None)
@given(extent=extents, multiprocessors=st.sampled_from([1, 3, 132]))
@example(extent=Extent(0, 5, 4, False, 4), multiprocessors=1)
def test_every_vector_is_read_once(extent: Extent, multiprocessors: int) -> None:
    geometry = divide(extent, multiprocessors)
    assert geometry.block[0] * geometry.block[1] <= MAX_THREADS
    read = [
        offset
        for tile in range(geometry.grid[0])
        for split in range(geometry.grid[1])
        for x in range(geometry.block[0])
        for y in range(geometry.block[1])
        for offset in walk(extent, tile, split, x, y, multiprocessors)
    ]
    size = extent.rows * extent.channels * extent.spatial
    assert sorted(read) == list(range(0, size, extent.width))


@pytest.mark.parametrize(
    "extent",
    [
        Extent(70_000, 64, 112 * 112, False, 8),
        Extent(70_000 * 112 * 112, 64, 1, True, 8),
        Extent(2**33, 1, 1, True, 1),
        Extent(3, 1, 2**31 - 1, False, 1),
        Extent(2, 2**20, 49, False, 1),
    ],
)
def test_more_elements_than_32_bits_count(extent: Extent) -> None:
    geometry = divide(extent, 132)
    # What the kernels hold in an int: threads that divide a channel, and vectors of one of them.
    threads = geometry.grid[1] * geometry.block[1]
    assert threads < 2**31
    assert struct.unpack("5q4i", geometry.packed)[7] < 2**31
    # The thread that reads the very last vector.
    total = extent.rows * (extent.spatial // extent.width if extent.spatial > 1 else 1)
    split, y = divmod((total - 1) % threads, geometry.block[1])
    last = walk(extent, geometry.grid[0] - 1, split, geometry.block[0] - 1, y, 132)[-1]
    assert last == extent.rows * extent.channels * extent.spatial - extent.width


def test_work_is_spread_over_the_device_but_not_thinner_than_a_few_vectors() -> None:
    large = divide(Extent(32 * 56 * 56, 256, 1, True, 8), 132)
    assert large.grid[0] * large.grid[1] >= 4 * 132
    small = divide(Extent(40, 256, 1, True, 8), 132)
    assert small.grid[1] <= 2
