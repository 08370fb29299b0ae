"""Tensor parallel: which part of each matrix this rank holds, and where partial results meet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """One rank of several that hold a model between them."""

    rank: int = 0
    size: int = 1

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
        """The sum of all ranks' `partial` results, on every rank."""
        if self.size > 1:
            self._refuse()
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' parts, joined along the last dimension in order of rank, on every rank."""
        if self.size > 1:
            self._refuse()
        return part

    def _refuse(self) -> None:
        raise ConfigError(
            f"tensor_parallel_size={self.size} is not supported yet: use tensor_parallel_size=1."
        )


SINGLE = TensorParallel()
