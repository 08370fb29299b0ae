"""Who goes first among those that wait."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from quire.engine.sequence import Sequence

CACHE_AWARE_WINDOW = 256  # how many of the longest waiting are compared each step
AGEING_TOKENS = 16  # a step of waiting counts as much as this many cached tokens


class WaitingQueue:
    """Waiting sequences in order of arrival, or of priority (the lower number first).

    Background ones stand behind all others, whatever the policy, and have turns, of which the lower
    comes first. `cache-aware` picks the longest cached prefix among the first comers; every step of
    waiting adds to a sequence's worth, so that no sequence starves.
    """

    def __init__(self, policy: str, cached_tokens: Callable[[Sequence], int]) -> None:
        self.policy = policy
        self._cached_tokens = cached_tokens
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def first(self) -> Sequence | None:
        return self._queue[0] if self._queue else None

    @property
    def has_foreground(self) -> bool:
        """Whether a sequence waits that is not of the background: the first is one, then."""
        return bool(self._queue) and not self._queue[0].request.is_background

    def rank(self, sequence: Sequence) -> tuple[bool, int]:
        """The lower goes first, whenever it came, and gives way to none of a higher one."""
        request = sequence.request
        return request.is_background, request.priority if self.policy == "priority" else 0

    def order(self, sequence: Sequence) -> tuple[bool, int, int, int, int]:
        request = sequence.request
        return *self.rank(sequence), request.turn, request.number, sequence.sample

    def add(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=self.order)

    def clear(self) -> None:
        self._queue.clear()

    def discard(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def in_order(self, step: int) -> list[Sequence]:
        """The queue as this step should try it."""
        if self.policy != "cache-aware":
            return list(self._queue)
        window = self._queue[:CACHE_AWARE_WINDOW]

        def worth(sequence: Sequence) -> tuple[bool, int]:
            request = sequence.request
            waited = step - sequence.waiting_since - request.turn
            tokens = self._cached_tokens(sequence) + AGEING_TOKENS * waited
            return not request.is_background, tokens

        return sorted(window, key=worth, reverse=True)
