"""Tensor parallel: which part of each matrix this rank holds, and where partial results meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, cat

from quire.errors import ConfigError


class Collectives(Protocol):
    """What the ranks of a model do together; each has to call the same, in the same order."""

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace every rank's tensor by the sum of all."""
        ...

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' parts, in order of rank, on rank 0; elsewhere nothing."""
        ...

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace every rank's tensor by that of rank 0."""
        ...


@dataclass(frozen=True)
class TensorParallel:
    """One rank of several that hold a model between them.

    Without a group nothing is exchanged: shapes are right then, and for one rank values are too.
    """

    rank: int = 0
    size: int = 1
    group: Collectives | None = None
    expert_parallel: bool = False  # experts are whole on their ranks, not cut

    @property
    def alone(self) -> TensorParallel:
        """The same shard, without a group to exchange anything with."""
        return replace(self, group=None)

    def split(self, units: int, what: str) -> range:
        """This rank's part of `units` that can be dealt out evenly."""
        if units % self.size:
            raise ConfigError(
                f"tensor_parallel_size={self.size} does not divide the model's {units} {what}: "
                f"choose a size that does."
            )
        count = units // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def split_or_share(self, units: int, what: str) -> range:
        """As `split`, but with fewer units than ranks, neighbours hold the same one."""
        if units < self.size and self.size % units == 0:
            mine = self.rank * units // self.size
            return range(mine, mine + 1)
        return self.split(units, what)

    def split_padded(self, units: int) -> range:
        """Equal parts of units that need not divide evenly: the last may reach past the end."""
        count = -(-units // self.size)
        return range(self.rank * count, (self.rank + 1) * count)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' `partial` results, on every rank; `partial` may be overwritten."""
        if self.group is not None:
            self.group.all_reduce_(partial)
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' parts, joined along the last dimension in order of rank, on rank 0.

        Elsewhere what comes back is of no use.
        """
        if self.group is None:
            return part
        parts = self.group.gather(part)
        if len(parts) < 2:
            return part
        return cat(parts, dim=-1)


SINGLE = TensorParallel()
