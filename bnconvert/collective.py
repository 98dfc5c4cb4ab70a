"""Exchange of small Python values between ranks, in which a rank can say that it failed.

Between two exchanges a rank may fail on its own (its data cannot be read, its memory is full). The
others then wait for it in the next exchange, for as long as the process group's timeout. So a rank
that fails takes part in that exchange with its error, and all others raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from bnconvert.errors import BnconvertError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ValueT = TypeVar("ValueT")


class PeerError(BnconvertError):
    """Another rank failed; this one had nothing to do with it."""


class Ranks:
    """The ranks that work together; one rank alone when torch.distributed is not in use.

    Attributes:
        rank: Number of this process in the group.
        size: Number of processes in the group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self.active = dist.is_available() and dist.is_initialized()
        self._group = group
        self.rank = dist.get_rank(group) if self.active else 0
        self.size = dist.get_world_size(group) if self.active else 1

    @classmethod
    def alone(cls) -> Ranks:
        """Return one rank that shares with nobody, also where torch.distributed is in use."""
        ranks = cls.__new__(cls)
        ranks.active, ranks._group, ranks.rank, ranks.size = False, None, 0, 1
        return ranks

    def share(self, value: ValueT) -> list[ValueT]:
        """Return the value of every rank, by rank; all ranks must call this.

        Raises:
            PeerError: A rank called `fail` instead.
        """
        gathered = self._gather((None, value))
        failed = [(rank, error) for rank, (error, _) in enumerate(gathered) if error is not None]
        if failed:
            raise PeerError("; ".join(f"rank {rank} failed: {error}" for rank, error in failed))
        return [value for _, value in gathered]

    def fail(self, error: Exception) -> None:
        """Tell the ranks that are in `share`, or come to it, that this rank has failed.

        When all ranks fail at the same point, each calls this and each keeps its own error.
        """
        if not isinstance(error, PeerError):
            self._gather((str(error) or type(error).__name__, None))

    def members(self, group: ProcessGroup | None) -> list[int]:
        """Return the ranks, numbered as here, that are also in another group."""
        from bnconvert.kernels import comm

        others = set(comm.ranks_of(group))
        own = comm.ranks_of(self._group)
        return [rank for rank, everywhere in enumerate(own) if everywhere in others]

    def _gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered
