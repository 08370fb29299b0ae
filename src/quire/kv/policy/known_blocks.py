"""Every block a policy remembers, resident or not: one row each, in columns.

A tier may have a million blocks and remember several million more. Columns of small numbers are
compact, and Python's garbage collector has nothing to walk through.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic

import numpy as np

from quire.kv.policy.eviction_queues import Run
from quire.kv.policy.need import NONE, by_need
from quire.kv.policy.protocol import K

SEEN, RESIDENT, UNWANTED = range(3)  # asked for; held; offered, but turned away then or later
NO_RUN = Run(cell=0, born=0)  # where a block is before its first use


class KnownBlocks(Generic[K]):
    """Rows by key, and the tree of the resident ones."""

    def __init__(self) -> None:
        self.rows: dict[K, int] = {}
        self.keys: list[K | None] = []
        self.run: list[Run] = []  # the use that touched it last
        self.uses = array("H")  # as many as make a difference
        self.generation = bytearray()
        self.state = bytearray()
        self._parent = array("i")
        self.first_child = array("i")
        self._next_sibling = array("i")
        self._previous_sibling = array("i")
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, key: K, run: Run, generation: int) -> int:
        if self._free:
            row = self._free.pop()
            self.keys[row] = key
            self.run[row] = run
            self.generation[row] = generation
        else:
            row = len(self.keys)
            self.keys.append(key)
            self.run.append(run)
            self.uses.append(0)
            self.generation.append(generation)
            self.state.append(SEEN)
            for links in (self._parent, self.first_child, self._next_sibling):
                links.append(NONE)
            self._previous_sibling.append(NONE)
        self.rows[key] = row
        return row

    def forget(self, row: int) -> None:
        key = self.keys[row]
        assert key is not None
        del self.rows[key]
        self.keys[row] = None
        self.uses[row] = 0
        self.state[row] = SEEN
        self._free.append(row)

    def attach(self, row: int, parent: int) -> None:
        """Make the row the first of its parent's children; `NONE` is the parent of a root."""
        self._parent[row] = parent
        if parent != NONE:
            sibling = self.first_child[parent]
            self._next_sibling[row] = sibling
            self._previous_sibling[row] = NONE
            if sibling != NONE:
                self._previous_sibling[sibling] = row
            self.first_child[parent] = row

    def detach(self, row: int) -> int:
        """Take the row from its parent, which is returned if no child is left to it."""
        parent = self._parent[row]
        if parent == NONE:
            return NONE
        before, after = self._previous_sibling[row], self._next_sibling[row]
        if after != NONE:
            self._previous_sibling[after] = before
        if before != NONE:
            self._next_sibling[before] = after
            return NONE
        self.first_child[parent] = after
        return parent if after == NONE else NONE

    def orphan(self, row: int) -> None:
        """Make roots of the children of a row that is lost."""
        child = self.first_child[row]
        while child != NONE:
            self._parent[child] = NONE
            child = self._next_sibling[child]
        self.first_child[row] = NONE

    def restore(self, keys: Sequence[K], parents: Sequence[K]) -> Sequence[int]:
        """Resident rows for many blocks at once, where there are none yet.

        Returns the rows, the least needed first.
        """
        assert not self.keys, "blocks are restored before any other is known"
        count = len(keys)
        self.keys.extend(keys)
        self.rows = rows = dict(zip(keys, range(count), strict=True))
        self.run.extend([NO_RUN] * count)
        self.uses = array("H", [1]) * count
        self.generation = bytearray([1]) * count
        self.state = bytearray([RESIDENT]) * count
        above = np.fromiter((rows.get(parent, NONE) for parent in parents), np.int32, count)
        # Siblings side by side: each is linked with its neighbours.
        order = np.argsort(above, kind="stable").astype(np.int32)
        is_first = np.diff(above[order], prepend=NONE) != 0
        has_parent = above[order] != NONE
        before = np.where(is_first | ~has_parent, NONE, np.roll(order, 1))
        columns = np.full((3, count), NONE, dtype=np.int32)
        next_sibling, previous_sibling, first_child = columns
        previous_sibling[order] = before
        next_sibling[before[before != NONE]] = order[before != NONE]
        first_child[above[order[is_first & has_parent]]] = order[is_first & has_parent]
        self._parent = array("i", above.tobytes())
        self._next_sibling = array("i", next_sibling.tobytes())
        self._previous_sibling = array("i", previous_sibling.tobytes())
        self.first_child = array("i", first_child.tobytes())
        return by_need(self._parent)
