"""Blocks in the order in which they have to leave, without touching each of them as they age.

Blocks that a request touched together, and that are of one class, stay together: a run. A run is of
one age, so it has a place in a cell of the model, and wanders to the next cell as it gets older.
Each cell has a shelf with the runs that still have resident blocks; the victim is the last block of
the first run on the least valuable shelf. A block that was touched again belongs to a newer run,
and its old run passes over it.

    request A  [ 3 4 5 | 6 7 ]     run of class "used twice": 3 4 5, run of class "new": 6 7
    request B  [ 3 4 | 8 ]         run: 3 4, run: 8;  A's are left with 5 and 6 7

A request is one tenant's, and so is a run. Where tenants have quotas, each has its own shelves.
"""

from __future__ import annotations

from collections import deque

from quire.kv.policy.reuse_model import ReuseModel


class Run:
    """Rows of blocks from head to tail; some may have moved on to a newer run."""

    __slots__ = (
        "born",
        "cell",
        "end",
        "is_held",
        "is_past_memory",
        "num_left",
        "num_resident",
        "rows",
        "shelves",
    )

    def __init__(self, cell: int, born: float) -> None:
        self.cell = cell
        self.born = born  # the number of a request; those from before a restart stand in between
        self.rows: list[int] = []
        self.num_left = 0  # those that have not moved on
        self.num_resident = 0
        self.end = 0  # no resident block stands at or behind this place
        self.is_held = False  # its last resident block cannot leave: off the shelves until it can
        self.is_past_memory = False  # only resident blocks are remembered, and only until they go
        self.shelves: EvictionQueues | None = None  # its tenant's, once it has resident blocks


class EvictionQueues:
    """Runs with resident blocks, by cell."""

    def __init__(self, model: ReuseModel) -> None:
        self.num_resident = 0  # blocks
        self._model = model
        self._by_cell: dict[int, deque[Run]] = {}
        self._lowest = 0  # no shelf before this one, in the model's order, has a run

    def put(self, run: Run) -> None:
        """On its shelf, where it is found when that shelf's turn has come."""
        shelf = self._by_cell.get(run.cell)
        if shelf is None:
            shelf = self._by_cell[run.cell] = deque()
        shelf.append(run)
        rank = self._model.rank[run.cell]
        if rank < self._lowest:
            self._lowest = rank

    def reorder(self) -> None:
        """The model's values have changed."""
        self._lowest = 0

    def first(self) -> Run | None:
        """A run of the least valuable cell that has resident blocks to give."""
        order, shelves = self._model.order, self._by_cell
        for place in range(self._lowest, len(order)):
            cell = order[place]
            shelf = shelves.get(cell)
            if shelf is None:
                continue
            while shelf:
                run = shelf[0]
                if run.cell == cell and run.num_resident and not run.is_held:
                    self._lowest = place
                    return run
                shelf.popleft()
            del shelves[cell]
        self._lowest = len(order)
        return None

    def move_on(self, run: Run, cell: int) -> None:
        """It was in that cell and is in the next one now."""
        if run.num_resident and not run.is_held:
            self.put(run)
        # A shelf whose turn never comes must not collect runs that are long gone.
        shelf = self._by_cell.get(cell)
        if shelf is not None:
            while shelf and (shelf[0].cell != cell or not shelf[0].num_resident):
                shelf.popleft()
            if not shelf:
                del self._by_cell[cell]
