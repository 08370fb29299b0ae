"""A request's blocks become runs: those of one class that stand together, and are one tenant's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from quire.kv.policy.ages import Ages
from quire.kv.policy.classes import CLASS_AFTER, CLASS_OF_NEW, MOST_USES, NEXT_GENERATION
from quire.kv.policy.eviction_queues import Run
from quire.kv.policy.known_blocks import NO_RUN, RESIDENT, KnownBlocks
from quire.kv.policy.need import NONE
from quire.kv.policy.protocol import K
from quire.kv.policy.reuse_model import ReuseModel


class Runs(Generic[K]):
    """Makes runs of known blocks, and tells the model which blocks have come back."""

    def __init__(self, known: KnownBlocks[K], model: ReuseModel, ages: Ages) -> None:
        self._known = known
        self._model = model
        self._ages = ages

    def gather(self, keys: Sequence[K], now: int) -> None:
        """Take the blocks of a request out of the runs of their last use and into new ones."""
        known, returned = self._known, self._model.returned
        rows_by_key, run_of, state = known.rows, known.run, known.state
        generation = 0
        rows = []
        for key in keys:
            row = rows_by_key.get(key)
            if row is None:
                row = known.add(key, NO_RUN, NEXT_GENERATION[generation])
            else:
                run = run_of[row]
                returned[run.cell] += 1
                run.num_left -= 1
                if state[row] == RESIDENT:
                    run.num_resident -= 1
                generation = known.generation[row]
            rows.append(row)
        self._make(rows, now)

    def _make(self, rows: list[int], now: int) -> None:
        known, num_ages = self._known, self._model.num_ages
        run_of, uses, state = known.run, known.uses, known.state
        run, run_class = None, NONE
        last = rows[-1]
        for row in rows:
            count = uses[row]
            if count == 0:
                uses[row] = 1
                block_class = CLASS_OF_NEW[known.generation[row]] + (row == last)
            else:
                block_class = CLASS_AFTER[count]
                if count < MOST_USES:
                    uses[row] = count + 1
            queues = run_of[row].queues if state[row] == RESIDENT else None
            if (
                run is None
                or block_class != run_class
                or (run.queues is not queues and queues is not None and run.queues is not None)
            ):
                if run is not None:
                    self._ages.append(run)
                run_class = block_class
                run = Run(run_class * num_ages, now)
            run.rows.append(row)
            run.num_left += 1
            run_of[row] = run
            if queues is not None:
                run.num_resident += 1
                run.queues = queues
        assert run is not None
        self._ages.append(run)

    def add_behind(self, key: K, parent: int, now: int) -> int:
        """A block that no request asked for, an answer's, belongs to the use of its parent."""
        known = self._known
        generation = 1
        if parent != NONE:
            generation = known.generation[parent]
            if known.uses[parent] > 1:
                generation = NEXT_GENERATION[generation]
        run = self._run_behind(parent, CLASS_OF_NEW[generation], now)
        row = known.add(key, run, generation)
        known.uses[row] = 1
        run.rows.append(row)
        run.num_left += 1
        self._model.reached[run.cell] += 1
        return row

    def _run_behind(self, parent: int, block_class: int, now: int) -> Run:
        """The parent's own run if it ends there and is of this class, else a new one."""
        num_ages = self._model.num_ages
        if parent != NONE:
            run = self._known.run[parent]
            is_alike = run.cell // num_ages == block_class and not run.is_past_memory
            if is_alike and run.rows[-1] == parent:
                return run
        run = Run(block_class * num_ages, now)
        self._ages.append(run)
        return run

    def set_apart(self, row: int, now: int) -> Run:
        """A run of its own for a block that stands among another tenant's."""
        was_in, num_ages = self._known.run[row], self._model.num_ages
        was_in.num_left -= 1
        run = Run(was_in.cell // num_ages * num_ages, now)
        run.rows.append(row)
        run.num_left = 1
        self._known.run[row] = run
        self._ages.append(run)
        return run
