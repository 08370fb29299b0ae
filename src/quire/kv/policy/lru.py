"""The baseline: the block that nobody asked for the longest has to leave."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic

from quire.kv.policy.protocol import K, nobody_listens


class LRUPolicy(Generic[K]):
    """Takes every block it is offered, as long as one of the others can leave.

    Those that can leave have no pins and no resident children. They stand in a heap by their last
    use. What the heap says is checked when a block comes out of it: it may have been used since,
    and goes back to its new place, or may be held, and goes back when it is let go.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.on_evict: Callable[[K], None] = nobody_listens
        self._now = 0
        self._last_use: dict[K, int] = {}  # of each resident block
        self._parents: dict[K, K | None] = {}
        self._children: dict[K, set[K]] = {}
        self._pins: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []  # last use, a number for equal ones, key
        self._in_heap: set[K] = set()
        self._num_pushed = 0
        # Blocks that had to leave or were turned away, the first of them first.
        self._gone: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_use)

    def __contains__(self, key: K) -> bool:
        return key in self._last_use

    @property
    def num_ghosts(self) -> int:
        return len(self._gone)

    def use(self, keys: Sequence[K]) -> None:
        self._now += 1
        for key in keys:
            if key in self._last_use:
                self._last_use[key] = self._now

    def offer(self, key: K, parent: K | None) -> bool:
        if key in self._last_use:
            return True
        if parent not in self._last_use:
            if parent in self._gone:
                return False
            parent = None
        if len(self._last_use) >= self.capacity and not self._make_room(parent):
            self._remember(key)
            return False
        self._add(key, parent)
        return True

    def restore(self, keys: Sequence[K], parents: Sequence[K]) -> None:
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):  # parents first
            self._add(key, parent if parent in self._last_use else None)
        for key in keys:
            self._now += 1
            self._last_use[key] = self._now

    def pin(self, key: K) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: K) -> None:
        pins = self._pins.pop(key)
        if pins > 1:
            self._pins[key] = pins - 1
        else:
            self._let_go(key)

    def remove(self, key: K) -> None:
        if key in self._last_use:
            self._drop(key)

    def _make_room(self, parent: K | None) -> bool:
        if parent is not None:
            self.pin(parent)  # what is to come needs it
        victim = self._least_recently_used()
        if parent is not None:
            self.unpin(parent)
        if victim is None:
            return False
        self._drop(victim)
        self.on_evict(victim)
        self._remember(victim)
        return True

    def _remember(self, key: K) -> None:
        self._gone[key] = None
        if len(self._gone) > self.capacity:
            self._gone.popitem(last=False)

    def _least_recently_used(self) -> K | None:
        while self._heap:
            last_use, _, key = heapq.heappop(self._heap)
            self._in_heap.discard(key)
            if key in self._last_use and not self._is_held(key):
                if self._last_use[key] == last_use:
                    return key
                self._let_go(key)
        return None

    def _is_held(self, key: K) -> bool:
        return bool(self._children[key]) or key in self._pins

    def _let_go(self, key: K) -> None:
        """Put a block into the heap if it can leave."""
        if key in self._last_use and key not in self._in_heap and not self._is_held(key):
            self._in_heap.add(key)
            self._num_pushed += 1
            heapq.heappush(self._heap, (self._last_use[key], self._num_pushed, key))

    def _add(self, key: K, parent: K | None) -> None:
        self._last_use[key] = self._now
        self._parents[key] = parent
        self._children[key] = set()
        if parent is not None:
            self._children[parent].add(key)
        self._gone.pop(key, None)
        self._let_go(key)

    def _drop(self, key: K) -> None:
        parent = self._parents.pop(key)
        for child in self._children.pop(key):
            self._parents[child] = None
        del self._last_use[key]
        if parent is not None:
            self._children[parent].discard(key)
            self._let_go(parent)
