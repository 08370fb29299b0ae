"""Who holds which block right now, worked out from the tables; no loop over blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Sequence

NO_OWNER = -1
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Holdings:
    sequences: list[Sequence]  # that have a table, in the order of their arrival
    holders: Ints  # by block: tables and copies that hold it
    owner: Ints  # by block: the first of `sequences` that holds it, or NO_OWNER
    is_keyed: npt.NDArray[np.bool_]  # by block: whether others can find it

    def empty_slots(self, block_size: int) -> int:
        """In blocks that are held. Only a table's last has any; samples of one prompt share it."""
        tables = [t for s in self.sequences if s.table is not None for t in s.table.groups]
        empty = {
            int(t.ids[-1]): (t.first + len(t)) * block_size - t.length for t in tables if len(t)
        }
        return sum(empty.values())

    @property
    def in_use(self) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.bool_] = self.holders > 0
        return held

    @property
    def cached(self) -> npt.NDArray[np.bool_]:
        unheld: npt.NDArray[np.bool_] = self.is_keyed & (self.holders == 0)
        return unheld

    def counts_by_holders(self, bounds: list[int]) -> list[int]:
        """How many blocks in use have at most so many holders, by bound; the rest is the last."""
        held = self.holders[self.holders > 0]
        places = np.searchsorted(np.array(bounds), held)
        counts: list[int] = np.bincount(places, minlength=len(bounds) + 1).tolist()
        return counts


def with_tables(scheduler: Scheduler) -> list[Sequence]:
    """Sequences that hold blocks, in the order of their arrival."""
    found = [s for s in (*scheduler.running, *scheduler.loading) if s.table is not None]
    return sorted(found, key=lambda s: (s.request.number, s.sample))


def take_stock(scheduler: Scheduler) -> Holdings:
    """As it is between two steps."""
    cache, tiering = scheduler.cache, scheduler.tiering
    sequences = with_tables(scheduler)
    tables = [s.table.ids for s in sequences if s.table is not None]
    copies = np.array(tiering.copied_blocks(), dtype=np.int32)
    holders = np.bincount(np.concatenate([*tables, copies]), minlength=cache.num_blocks)
    return Holdings(
        sequences,
        holders.astype(np.int32),
        _owners(tables, cache.num_blocks),
        np.frombuffer(cache.allocator.keyed, dtype=np.bool_),
    )


def _owners(tables: list[Ints], num_blocks: int) -> Ints:
    owner = np.full(num_blocks, NO_OWNER, dtype=np.int32)
    if tables:
        # From the last to the first, so that the first to arrive has the last word.
        places = np.arange(len(tables) - 1, -1, -1, dtype=np.int32)
        lengths = [len(table) for table in reversed(tables)]
        owner[np.concatenate(tables[::-1])] = np.repeat(places, lengths)
    return owner
