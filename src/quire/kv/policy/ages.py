"""All runs by age, of every tenant: they grow older together, and the oldest are forgotten."""

from __future__ import annotations

from collections import deque

from quire.kv.policy.eviction_queues import Run
from quire.kv.policy.reuse_model import ReuseModel


class Ages:
    """Moves runs from cell to cell, and from queue to queue, as requests go by."""

    def __init__(self, model: ReuseModel) -> None:
        self._model = model
        self._by_age: list[deque[Run]] = [deque() for _ in model.ages]  # the oldest first

    def append(self, run: Run) -> None:
        """A new run whose blocks are counted."""
        run.end = len(run.rows)
        self._model.reached[run.cell] += run.num_left
        self._by_age[0].append(run)
        if run.num_resident:
            assert run.queues is not None
            run.queues.put(run)

    def grow_older(self, now: int) -> list[Run]:
        """Move on all runs that have reached the next age; returns those that lost many blocks."""
        ages, reached = self._model.ages, self._model.reached
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
                    if 2 * run.num_left < len(run.rows):
                        thinned.append(run)
                if run.queues is not None:
                    run.queues.move_on(run, cell)
        return thinned

    def pop_oldest(self, before: int, but: Run | None = None) -> Run | None:
        """Take out the oldest run, if it was born before that time and is not `but`."""
        for runs in reversed(self._by_age):
            if runs:
                is_old = runs[0].born < before and runs[0] is not but
                return runs.popleft() if is_old else None
        return None
