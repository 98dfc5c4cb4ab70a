"""How a launch divides a tensor among blocks and threads; the other half of `cuda/position.cuh`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

MAX_THREADS = 256  # of a block; `kMaxThreads` in the sources
TILE_VECTORS = 32  # vectors of neighbouring channels in a block: 512 bytes of a row
BLOCKS_PER_MULTIPROCESSOR = 4
VECTORS_PER_THREAD = 4  # below this, another block costs more than it takes over

_GEOMETRY = struct.Struct("5q4i")


@dataclass(frozen=True)
class Extent:
    """A tensor as the kernels see it.

    Attributes:
        rows: Images; for channels last, images times positions.
        channels: Channels.
        spatial: Positions of an image; 1 for channels last.
        channels_last: Whether neighbours in memory belong to neighbouring channels.
        width: Elements per memory access; divides `channels` for channels last, else `spatial`.
    """

    rows: int
    channels: int
    spatial: int
    channels_last: bool
    width: int


@dataclass(frozen=True)
class Geometry:
    """The shape of a launch.

    Attributes:
        grid: Tiles of channels, and splits of the values of a tile.
        block: Threads across the channels of a tile, and threads that divide its values.
        packed: The `Geometry` of the sources, as bytes.
        tile_channels: Channels of a tile.
        thread_channels: Channels of one thread.
    """

    grid: tuple[int, int]
    block: tuple[int, int]
    packed: bytes
    tile_channels: int
    thread_channels: int

    @property
    def reduction_bytes(self) -> int:
        """Shared memory in which a block adds up two quantities, or keeps three constants."""
        threads = self.block[0] * self.block[1]
        return max(8 * threads * self.thread_channels, self.constant_bytes(3))

    def constant_bytes(self, constants: int) -> int:
        """Shared memory for some floats per channel."""
        return 4 * constants * self.tile_channels


@lru_cache(maxsize=4096)
def divide(extent: Extent, multiprocessors: int) -> Geometry:
    """Divide a tensor among the blocks of a launch.

    Args:
        extent: The tensor; without rows, there is one split, whose threads have no vectors.
        multiprocessors: Number of multiprocessors of the device.
    """
    if extent.channels_last:
        vectors = extent.channels // extent.width  # of a row
        tiles = -(-vectors // TILE_VECTORS)
        across = -(-vectors // tiles)
        down = max(1, min(MAX_THREADS // across, extent.rows))
        total = extent.rows
    else:
        tiles, across = extent.channels, 1
        total = extent.rows * (extent.spatial // extent.width)
        down = min(MAX_THREADS, max(1, -(-total // 32)) * 32)
    wanted = -(-multiprocessors * BLOCKS_PER_MULTIPROCESSOR // tiles)
    useful = -(-total // (down * VECTORS_PER_THREAD))
    splits = max(1, min(wanted, useful))
    thread_channels = extent.width if extent.channels_last else 1
    return Geometry(
        grid=(tiles, splits),
        block=(across, down),
        packed=_pack(extent, stride=splits * down, total=total),
        tile_channels=across * thread_channels,
        thread_channels=thread_channels,
    )


def _pack(extent: Extent, stride: int, total: int) -> bytes:
    """Return the walk of a thread that takes every `stride`-th of `total` vectors or rows."""
    image = extent.channels * extent.spatial
    iterations, remainder = divmod(total, stride)
    if extent.channels_last:
        walk = (stride * image, 0)
        within = (1, 0)
    else:
        vectors = max(1, extent.spatial // extent.width)
        images, positions = divmod(stride, vectors)
        walk = (images * image + positions * extent.width, image - extent.spatial)
        within = (vectors, positions)
    return _GEOMETRY.pack(
        extent.channels, image, extent.spatial, *walk, *within, iterations, remainder
    )
