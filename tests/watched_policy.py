"""A policy with a slow model beside it, which checks after every call what must always hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from quire.kv.policy import LearnedPolicy, LRUPolicy, Policy

POLICIES: list[Callable[..., Policy[int]]] = [LRUPolicy, LearnedPolicy]


def nobodys(key: int) -> Any:
    return None


class WatchedPolicy:
    """Knows the resident blocks from what the policy answered and from `on_evict`, nothing else."""

    def __init__(self, policy: Policy[int], tenant_of: Callable[[int], Any] = nobodys) -> None:
        self.policy = policy
        self.tenant_of = tenant_of
        self.parents: dict[int, int | None] = {}  # of the resident blocks
        self.unwanted: set[int] = set()  # had to leave or were turned away, and are not back
        self.pins: Counter[int] = Counter()
        self.left: list[int] = []  # during the last call
        self._arriving_behind: int | None = None
        self._pressed: list[Any] = []  # tenants that have to make room for themselves
        self._last_use: dict[int, int] = {}
        self._now = 0
        policy.on_evict = self._on_evict

    def can_leave(self) -> list[int]:
        """Resident blocks that nothing holds; if a tenant is at its quota, of its own."""
        held = set(self.parents.values()) | self.pins.keys() | {self._arriving_behind}
        return [key for key in self.parents if key not in held and self._may_leave_for(key)]

    def _may_leave_for(self, key: int) -> bool:
        return not self._pressed or self.tenant_of(key) in self._pressed

    def held_by(self, tenant: Any) -> int:
        return sum(self.tenant_of(key) == tenant for key in self.parents)

    @property
    def quota(self) -> int:
        return int(self.policy.tenant_share * self.policy.capacity)

    def use(self, keys: Sequence[int]) -> None:
        self.left.clear()
        self._now += 1
        self._last_use.update((key, self._now) for key in keys if key in self.parents)
        self.policy.use(keys)
        assert self.left == [], "a look must not evict"
        self.check(keys)

    def offer(self, key: int, parent: int | None) -> bool:
        self.left.clear()
        was_there = key in self.parents
        tenant = self.tenant_of(key)
        self._pressed = [tenant] if self.held_by(tenant) >= self.quota else []
        had_room = len(self.parents) < self.policy.capacity and not self._pressed
        behind = self._arriving_behind = parent if parent in self.parents else None
        could_leave = self.can_leave()
        taken = self.policy.offer(key, parent, tenant)
        self._arriving_behind, self._pressed = None, []
        if was_there:
            assert (taken, self.left) == (True, [])
            return True
        if parent in self.unwanted and not taken:
            assert self.left == [], "it was turned away for its parent, others left nonetheless"
        elif had_room:
            assert (taken, self.left) == (True, [])
        else:
            assert len(self.left) == taken, "one comes, one leaves"
            assert could_leave or not taken
            self.unwanted |= set() if taken else {key}
        if taken:
            self._add(key, behind)
        self.check([key, *self.left])
        return taken

    def restore(self, keys: Sequence[int], parents: Sequence[int]) -> None:
        """Children stand before their parents, as they are used after them."""
        self.left.clear()
        for key, parent in zip(keys, parents, strict=True):
            self._now += 1
            self._add(key, parent if parent in keys else None)
        held = Counter(map(self.tenant_of, keys))
        self._pressed = [tenant for tenant, count in held.items() if count > self.quota] or [
            "nothing has to leave"
        ]
        self.policy.restore(keys, parents, [self.tenant_of(key) for key in keys])
        self._pressed = []
        for tenant, count in held.items():
            assert self.held_by(tenant) == min(count, self.quota)
        self.check(keys)

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
        self.policy.remove(key)
        assert self.left == [], "lost is not evicted, and those behind it stay"
        if key in self.parents:
            del self.parents[key], self._last_use[key]
            self.parents.update({each: None for each, up in self.parents.items() if up == key})
        self.check([key])

    def _add(self, key: int, parent: int | None) -> None:
        self.parents[key] = parent
        self._last_use[key] = self._now
        self.unwanted.discard(key)

    def _on_evict(self, key: int) -> None:
        assert key in self.parents, "it left, but it was not here"
        assert key in self.can_leave(), "it left, but it was held"
        if isinstance(self.policy, LRUPolicy):
            others = [each for each in self.can_leave() if self._competes(each, key)]
            assert self._last_use[key] == min(self._last_use[each] for each in others)
        del self.parents[key], self._last_use[key]
        self.unwanted.add(key)
        self.left.append(key)

    def _competes(self, one: int, other: int) -> bool:
        """Whether either could have left; with several pressed tenants each has its own turn."""
        return len(self._pressed) < 2 or self.tenant_of(one) == self.tenant_of(other)

    def check(self, keys: Sequence[int]) -> None:
        assert len(self.policy) == len(self.parents) <= self.policy.capacity
        held = Counter(map(self.tenant_of, self.parents))
        assert max(held.values(), default=0) <= self.quota, "a tenant is over its quota"
        for key in keys:
            assert (key in self.policy) == (key in self.parents)

    def check_all(self, keys: Sequence[int]) -> None:
        self.check(keys)
        for parent in self.parents.values():
            assert parent is None or parent in self.policy, "a child without its parent"
