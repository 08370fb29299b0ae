"""Blocks in the order in which they have to leave, without touching each of them as they age.

Blocks that a request touched together, and that are of one class, stay together: a run. A run is of
one age, so it has a place in a cell of the model, and wanders to the next cell as it gets older.
Each cell has a queue with the runs that still have resident blocks; the victim is the last block of
the first run in the least valuable queue. A block that was touched again belongs to a newer run,
and its old run passes over it.

    request A  [ 3 4 5 | 6 7 ]     run of class "used twice": 3 4 5, run of class "new": 6 7
    request B  [ 3 4 | 8 ]         run: 3 4, run: 8;  A's are left with 5 and 6 7

A request is one tenant's, and so is a run. Where tenants have quotas, each has its own queues.
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
        "queues",
        "rows",
    )

    def __init__(self, cell: int, born: float) -> None:
        self.cell = cell
        self.born = born  # the number of a request; those from before a restart stand in between
        self.rows: list[int] = []
        self.num_left = 0  # those that have not moved on
        self.num_resident = 0
        self.end = 0  # no resident block stands at or behind this place
        self.is_held = False  # its last resident block cannot leave: out of the queues until it can
        self.is_past_memory = False  # only resident blocks are remembered, and only until they go
        self.queues: EvictionQueues | None = None  # its tenant's, once it has resident blocks


class EvictionQueues:
    """Runs with resident blocks: one queue for each cell of the reuse model."""

    def __init__(self, model: ReuseModel) -> None:
        self.num_resident = 0  # blocks
        self._model = model
        self._by_cell: dict[int, deque[Run]] = {}
        self._lowest = 0  # no queue before this one, in the model's order, has a run

    def put(self, run: Run) -> None:
        """Append the run to the queue of its cell."""
        queue = self._by_cell.get(run.cell)
        if queue is None:
            queue = self._by_cell[run.cell] = deque()
        queue.append(run)
        rank = self._model.rank[run.cell]
        if rank < self._lowest:
            self._lowest = rank

    def reorder(self) -> None:
        """The model's values have changed."""
        self._lowest = 0

    def first(self) -> Run | None:
        """A run of the least valuable cell that has resident blocks to give."""
        order, queues = self._model.order, self._by_cell
        for place in range(self._lowest, len(order)):
            cell = order[place]
            queue = queues.get(cell)
            if queue is None:
                continue
            while queue:
                run = queue[0]
                if run.cell == cell and run.num_resident and not run.is_held:
                    self._lowest = place
                    return run
                queue.popleft()
            del queues[cell]
        self._lowest = len(order)
        return None

    def move_on(self, run: Run, cell: int) -> None:
        """The run was in `cell`, and is in the next one now."""
        if run.num_resident and not run.is_held:
            self.put(run)
        # A queue whose turn never comes must not collect runs that are long gone.
        queue = self._by_cell.get(cell)
        if queue is not None:
            while queue and (queue[0].cell != cell or not queue[0].num_resident):
                queue.popleft()
            if not queue:
                del self._by_cell[cell]
