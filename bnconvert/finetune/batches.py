"""Which images make which batch, on which process: a function of seed, epoch and position alone.

The images of an epoch are shuffled once and cut into global batches, and every global batch into
consecutive parts, one per process. So two processes with 8 images each see, together and in order,
what one process with 16 images sees; a run can go on at any update; and the last, smaller batch is
shared out evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from collections.abc import Iterator

Key = tuple[int, int]
"""An epoch and the number of an image: what an `Examples` data set is asked for."""


@dataclass(frozen=True)
class Micro:
    """The part of one process in one global batch.

    Attributes:
        keys: The images of this process.
        weight: This process's share of the update's images times the number of processes: what
            its mean loss counts, so that the average of the processes' gradients is that of the
            mean over all images.
    """

    keys: tuple[Key, ...]
    weight: float


@dataclass(frozen=True)
class Plan:
    """How an epoch is cut up.

    Attributes:
        images: Number of training images.
        batch_size: Images per process.
        accumulate: Global batches per update.
        least: Fewest images per process in a batch; a smaller last batch is left out.
        rank: This process.
        size: Number of processes.
        seed: Seed of the shuffling.
    """

    images: int
    batch_size: int
    accumulate: int
    least: int
    rank: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.images < self.least * self.size:
            raise BnconvertError(
                f"data: {self.images} training images are too few for {self.size} processes, "
                f"which need {self.least} each; use fewer processes"
            )

    @property
    def global_batch(self) -> int:
        """Images in a full batch of all processes."""
        return self.batch_size * self.size

    @property
    def left_out(self) -> int:
        """Images of an epoch that are not used because the last batch is too small."""
        rest = self.images % self.global_batch
        return rest if rest < self.least * self.size else 0

    @property
    def updates(self) -> int:
        """Number of updates in an epoch."""
        batches = len(range(0, self.images - self.left_out, self.global_batch))
        return -(-batches // self.accumulate)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Micro, ...]]:
        """Yield this process's parts of every update of an epoch.

        Args:
            epoch: Decides the shuffling.
            start: The first update to yield.
        """
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = torch.randperm(self.images, generator=generator).tolist()
        step = self.global_batch * self.accumulate
        used = self.images - self.left_out
        for begin in range(start * step, used, step):
            group = order[begin : min(begin + step, used)]
            yield tuple(
                self._part(group[i : i + self.global_batch], epoch, len(group))
                for i in range(0, len(group), self.global_batch)
            )

    def _part(self, batch: list[int], epoch: int, update_images: int) -> Micro:
        low, high = (len(batch) * place // self.size for place in (self.rank, self.rank + 1))
        keys = tuple((epoch, index) for index in batch[low:high])
        return Micro(keys, len(keys) * self.size / update_images)


def mix(*numbers: int) -> int:
    """Return one seed made of several numbers, all of which matter."""
    seed = 0x9E3779B9
    for number in numbers:
        seed = (seed ^ (number & 0xFFFFFFFF)) * 0x100000001B3 & 0x7FFFFFFFFFFFFFFF
        seed ^= seed >> 29
    return seed
