"""A policy with a slow model beside it, which checks after every call what must always hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from quire.kv.policy import LearnedPolicy, LRUPolicy, Policy

POLICIES: list[Callable[[int], Policy[int]]] = [LRUPolicy, LearnedPolicy]


class WatchedPolicy:
    """Knows the resident blocks from what the policy answered and from `on_evict`, nothing else."""

    def __init__(self, policy: Policy[int]) -> None:
        self.policy = policy
        self.parents: dict[int, int | None] = {}  # of the resident blocks
        self.pins: Counter[int] = Counter()
        self.evicted: set[int] = set()  # that were here once and have not come back since
        self.left: list[int] = []  # during the last call, in order
        self._lost: set[int] = set()  # those that `remove` is taking out
        self._arriving_behind: int | None = None
        self.last_use: dict[int, int] = {}
        self._now = 0
        policy.on_evict = self._on_evict

    def can_leave(self) -> list[int]:
        """Resident blocks that nothing holds."""
        held = set(self.parents.values()) | self.pins.keys() | {self._arriving_behind}
        return [key for key in self.parents if key not in held]

    def use(self, keys: Sequence[int]) -> None:
        self.left.clear()
        self._now += 1
        self.last_use.update((key, self._now) for key in keys if key in self.parents)
        self.policy.use(keys)
        assert self.left == [], "nobody has to leave for a look"
        self.check(keys)

    def offer(self, key: int, parent: int | None) -> bool:
        self.left.clear()
        was_there = key in self.parents
        welcome = parent is None or parent in self.parents
        had_room = len(self.parents) < self.policy.capacity
        self._arriving_behind = parent
        could_leave = self.can_leave()
        taken = self.policy.offer(key, parent)
        self._arriving_behind = None
        if was_there or not welcome or had_room:
            assert (taken, self.left) == (welcome or was_there, [])
        else:
            assert len(self.left) == taken, "one comes, one leaves"
            assert could_leave or not taken
        if taken and not was_there:
            self.parents[key] = parent
            self.evicted.discard(key)
            self.last_use[key] = self._now
        self.check([key, *self.left])
        return taken

    def pin(self, key: int) -> None:
        self.policy.pin(key)
        self.pins[key] += 1
        self.check([key])

    def unpin(self, key: int) -> None:
        self.policy.unpin(key)
        self.pins -= Counter([key])
        self.check([key])

    def remove(self, key: int) -> None:
        self.left.clear()
        self._lost = lost = self._with_descendants(key)
        self.policy.remove(key)
        self._lost = set()
        assert len(self.left) == len(lost) and set(self.left) == lost
        self.check([key, *lost])

    def _with_descendants(self, key: int) -> set[int]:
        found = {key} & self.parents.keys()
        while more := {each for each, up in self.parents.items() if up in found} - found:
            found |= more
        return found

    def _on_evict(self, key: int) -> None:
        assert key in self.parents, "it left, but it was not here"
        assert key not in self.parents.values(), "it left before its children"
        assert self._lost or key in self.can_leave(), "it left, but it was held"
        if not self._lost and isinstance(self.policy, LRUPolicy):
            assert self.last_use[key] == min(self.last_use[each] for each in self.can_leave())
        del self.parents[key], self.last_use[key]
        if not self._lost:
            self.evicted.add(key)
        self.left.append(key)

    def check(self, keys: Sequence[int]) -> None:
        policy = self.policy
        assert len(policy) == len(self.parents) <= policy.capacity
        for key in keys:
            assert (key in policy) == (key in self.parents)
            # What left long ago may be forgotten; what never was here is never remembered so.
            assert not policy.was_evicted(key) or key in self.evicted
        if not self._lost and self.left:
            assert all(policy.was_evicted(key) == (key in self.evicted) for key in self.left)

    def check_all(self, keys: Sequence[int]) -> None:
        self.check(keys)
        for parent in self.parents.values():
            assert parent is None or parent in self.policy
