"""A tier behind a guard, whose calls are cut into batches of bounded size.

Each batch has a deadline of its own and the first that fails ends the call, so a store that hangs
is noticed after one batch, however long the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.kv.image import BlockName
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.guard import Guard
from quire.kv.tiers.tier import Tier

CONTROLLED = 60_000  # blocks that time is allowed for, where their number is not known
SLOWEST = 32e6  # bytes a second; a store that moves less is not worth the wait

T = TypeVar("T")
Answers = dict[int, bool]  # for those blocks of a batch that the store has answered for
Move = Callable[[Sequence[BlockName], Sequence[memoryview]], tuple[Answers, str | None]]


class BatchedTier(Tier):
    """What the tiers whose store is another process have in common."""

    name = "remote"
    is_local = False

    def __init__(
        self,
        guard: Guard,
        image_bytes: int | Sequence[int],
        batch: int,
        value_bytes: int,
        timeout: float,
    ) -> None:
        """A batch has `batch` blocks, of at most `value_bytes` each on their way."""
        super().__init__(image_bytes)
        self._guard, self._timeout = guard, timeout
        self._batch, self._value_bytes = batch, value_bytes

    def stats(self) -> dict[str, Any]:
        return super().stats() | self._guard.stats()

    def close(self) -> None:
        self._guard.close()

    def _in_batches(
        self, move: Move, names: Sequence[BlockName], images: Sequence[memoryview]
    ) -> list[bool]:
        done = [False] * len(names)
        for start in range(0, len(names), self._batch):
            batch = slice(start, start + self._batch)
            sizes = self.sizes(names[batch])
            cut = [image[:size] for image, size in zip(images[batch], sizes, strict=True)]
            answers, failure = move(names[batch], cut)
            for i, good in answers.items():
                done[start + i] = good
            if failure is not None:
                if unanswered := len(names) - start - len(answers):
                    self.counters.drop(failure, unanswered)
                break
        return done

    def _control(self, work: Callable[[Deadline], T | None], count: int) -> T | None:
        """Do what no request waits for, with more time; None if it could not be done."""
        done: list[T | None] = []
        seconds = self._timeout * (1 + count / 1000)
        self._guard.run("control", lambda by: done.append(work(by)), seconds)
        return done[0] if done else None

    def _seconds(self, count: int) -> float:
        """How long a batch with so many blocks may take."""
        return self._timeout + count * self._value_bytes / SLOWEST
