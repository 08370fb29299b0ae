"""Blocks in the order in which they have to leave, without touching each of them as they age.

Blocks that a request touched together, and that are of one class, stay together: a run. A run is of
one age, so it has a place in a cell of the model, and wanders to the next cell as it gets older.
Each cell has a shelf with the runs that still have resident blocks; the victim is the last block of
the first run on the least valuable shelf. A block that was touched again belongs to a newer run,
and its old run passes over it.

    request A  [ 3 4 5 | 6 7 ]     run of class "used twice": 3 4 5, run of class "new": 6 7
    request B  [ 3 4 | 8 ]         run: 3 4, run: 8;  A's are left with 5 and 6 7
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
    )

    def __init__(self, cell: int, born: int) -> None:
        self.cell = cell
        self.born = born
        self.rows: list[int] = []
        self.num_left = 0  # those that have not moved on
        self.num_resident = 0
        self.end = 0  # no resident block stands at or behind this place
        self.is_held = False  # its last resident block cannot leave: off the shelves until it can
        self.is_past_memory = False  # only resident blocks are remembered, and only until they go


class Shelves:
    """All runs by age, and those with resident blocks by cell too."""

    def __init__(self, model: ReuseModel) -> None:
        self._model = model
        self._by_age: list[deque[Run]] = [deque() for _ in model.ages]  # the oldest first
        self._by_cell: list[deque[Run]] = [deque() for _ in range(model.num_cells)]
        self._lowest = 0  # no shelf before this one, in the model's order, has a run

    def append(self, run: Run) -> None:
        """A new run whose blocks are counted."""
        run.end = len(run.rows)
        self._model.reached[run.cell] += run.num_left
        self._by_age[0].append(run)
        if run.num_resident:
            self.put(run)

    def put(self, run: Run) -> None:
        """On its shelf, where it is found when that shelf's turn has come."""
        self._by_cell[run.cell].append(run)
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
            shelf = shelves[cell]
            while shelf:
                run = shelf[0]
                if run.cell == cell and run.num_resident and not run.is_held:
                    self._lowest = place
                    return run
                shelf.popleft()
        self._lowest = len(order)
        return None

    def grow_older(self, now: int) -> list[Run]:
        """Move on all runs that have reached the next age; returns those that lost many blocks."""
        ages, reached, rank = self._model.ages, self._model.reached, self._model.rank
        shelves = self._by_cell
        thinned = []
        for age, young in enumerate(self._by_age[:-1], start=1):
            latest = now - ages[age]
            if latest < 0:
                break
            while young and young[0].born <= latest:
                run = young.popleft()
                cell = run.cell
                run.cell = cell + 1
                if run.num_left:
                    self._by_age[age].append(run)
                    reached[cell + 1] += run.num_left
                    if run.num_resident and not run.is_held:
                        shelves[cell + 1].append(run)  # as `put`, a million times
                        if rank[cell + 1] < self._lowest:
                            self._lowest = rank[cell + 1]
                    if 2 * run.num_left < len(run.rows):
                        thinned.append(run)
                # A shelf whose turn never comes must not collect runs that are long gone.
                shelf = shelves[cell]
                while shelf and (shelf[0].cell != cell or not shelf[0].num_resident):
                    shelf.popleft()
        return thinned

    def pop_oldest(self, before: int) -> Run | None:
        """Take out the oldest run, if it was born before that time."""
        for runs in reversed(self._by_age):
            if runs:
                return runs.popleft() if runs[0].born < before else None
        return None
