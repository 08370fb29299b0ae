"""Where the blocks of a prefix are, tier by tier, from the first on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.errors import KVError
from quire.kv.arguments import count_of
from quire.kv.image import BlockName
from quire.kv.job_queue import Handle
from quire.kv.loads import Found, Load
from quire.kv.pools.block_pool import Blocks

Keys = list[bytes] | Callable[[], list[bytes]]  # the latter are computed where they are asked for


class Answer(Handle):
    """A remote tier's answer to a look-up of keys; empty until it is done."""

    def __init__(self, place: str, first: int, deadline: float) -> None:
        super().__init__()
        self.place = place
        self.first = first  # the block that the first answer is about
        self.deadline = deadline
        self.holds: list[bool] = []


class Places(Protocol):
    """What a match needs of a store: to find blocks, to load them, to release them."""

    def clock(self) -> float: ...
    def locate(self, keys: Sequence[bytes], hold: bool = True) -> list[Found]: ...
    def ask(self, keys: Keys, first: int, patience: float) -> list[Answer]: ...
    def load(
        self,
        names: Sequence[BlockName],
        found: Sequence[Found],
        blocks: Blocks,
        places: Sequence[int] | None = None,
    ) -> Load: ...
    def release(self, found: Sequence[Found]) -> None: ...


def locate_all(
    store: Places, keys: Sequence[bytes], far: Callable[[int], Found | None]
) -> list[Found]:
    """Where blocks are, from the first on: near tiers, then a far one, then near ones again.

    `far(i)` says where a far tier has the block of `keys[i]`. Behind such a block near tiers are
    asked for one block alone: to ask for all that are left each time takes the square of their
    number. Blocks in host memory are held.
    """
    found = store.locate(keys)
    while len(found) < len(keys):
        each = far(len(found))
        if each is None:
            break
        found.append(each)
        at = len(found)
        if store.locate(keys[at : at + 1], hold=False):
            found += store.locate(keys[at:])
    return found


class TierMatch:
    """The blocks of a prefix that the tiers hold. It is loaded or dropped, exactly once.

    Images in host memory are held until then. What is elsewhere may be gone when it is read, and is
    a miss then. While a far tier is still asked, the match is not ready: it may yet grow.
    """

    def __init__(self, store: Places, names: Sequence[BlockName], patience: float) -> None:
        self.names = names
        self.found: list[Found] = []
        self._store = store
        self._answers: list[Answer] = []
        self._over = False
        self._walk()
        if len(self.found) < len(names):
            self._answers = store.ask(
                [name.key for name in names[len(self.found) :]], len(self.found), patience
            )

    def __len__(self) -> int:
        return len(self.found)

    @property
    def places(self) -> list[str]:
        return [each.place for each in self.found]

    def ready(self) -> bool:
        """Whether all tiers have answered, or are too late."""
        if not self._answers:
            return True
        now = self._store.clock()
        if any(not answer.done() and now < answer.deadline for answer in self._answers):
            return False
        answers, self._answers = self._answers, []
        self._walk([answer for answer in answers if answer.done()])
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is ready; False if it is not by then."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        for answer in self._answers:
            answer.wait(max(0.0, min(until, answer.deadline) - time.monotonic()))
        return self.ready()

    def load(self, blocks: Blocks) -> Load:
        """Begin to bring the first blocks of the match into `blocks` of the device."""
        names, found = self.take(blocks)
        return self._store.load(names, found, blocks[: len(found)])

    def take(self, blocks: Blocks) -> tuple[Sequence[BlockName], list[Found]]:
        """The first blocks of the match, for a load into `blocks`; the others are released."""
        self._finish()
        try:
            count = count_of(blocks)
        except KVError:
            self._store.release(self.found)
            raise
        self._store.release(self.found[count:])
        return self.names[: len(self.found[:count])], self.found[:count]

    def drop(self) -> None:
        """Release what the match holds; it will not be loaded."""
        self._finish()
        self._store.release(self.found)

    def _finish(self) -> None:
        if self._over:
            raise KVError("A match is loaded or dropped once; match again.")
        self._over = True

    def _walk(self, answers: Sequence[Answer] = ()) -> None:
        """On from where it stopped."""
        first = len(self.found)
        keys = [name.key for name in self.names[first:]]
        self.found += locate_all(self._store, keys, lambda at: self._far(answers, first + at))

    def _far(self, answers: Sequence[Answer], at: int) -> Found | None:
        """This block, if a tier has said that it has it."""
        for answer in answers:
            if at < answer.first + len(answer.holds) and answer.holds[at - answer.first]:
                return Found(answer.place)
        return None
