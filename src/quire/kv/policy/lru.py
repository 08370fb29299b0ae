"""The baseline: evicts the least recently used block."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic

from quire.kv.policy.need import NONE, by_need
from quire.kv.policy.protocol import K, ignore

Entry = tuple[int, int, K]  # last use, a number for equal ones, key


class LRUPolicy(Generic[K]):
    """Takes every block it is offered, as long as one of the others can leave.

    Those that can leave have no pins and no resident children. They stand in a heap by their last
    use, one for each tenant. What the heap says is checked when a block comes out of it: it may
    have been used since, and goes back to its new place, or may be held, and goes back when it is
    let go.
    """

    def __init__(self, capacity: int, tenant_share: float = 1.0) -> None:
        self.capacity = capacity
        self.tenant_share = tenant_share
        self.on_evict: Callable[[K], None] = ignore
        self._now = 0
        self._last_use: dict[K, int] = {}  # of each resident block
        self._parents: dict[K, K | None] = {}
        self._children: dict[K, set[K]] = {}
        self._pins: dict[K, int] = {}
        self._tenants: dict[K, Hashable] = {}
        self._num_held: Counter[Hashable] = Counter()  # by tenant
        self._heaps: dict[Hashable, list[Entry[K]]] = {}
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

    def offer(self, key: K, parent: K | None, tenant: Hashable = None) -> bool:
        if key in self._last_use:
            return True
        if parent not in self._last_use:
            if parent in self._gone:
                return False
            parent = None
        tenant = self._told_apart(tenant)
        if not self._make_room(parent, tenant):
            self._remember(key)
            return False
        self._add(key, parent, tenant)
        return True

    def restore(self, keys: Sequence[K], parents: Sequence[K], tenants: Sequence[Hashable]) -> None:
        rows = dict(zip(keys, range(len(keys)), strict=True))
        order = by_need([rows.get(parent, NONE) for parent in parents])
        for row in reversed(order):  # parents first
            parent = parents[row] if parents[row] in rows else None
            self._add(keys[row], parent, self._told_apart(tenants[row]))
        for row in order:
            self._now += 1
            self._last_use[keys[row]] = self._now
        for tenant in list(self._heaps):
            while self._num_held[tenant] > self._most_of_a_tenant:
                if not self._evict_one([tenant]):
                    break

    def has_its_share(self, tenant: Hashable) -> bool:
        most = int(self.tenant_share * self.capacity)
        return self.tenant_share < 1 and self._num_held[self._told_apart(tenant)] >= most

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

    @property
    def _most_of_a_tenant(self) -> int:
        return int(self.tenant_share * self.capacity)

    def _told_apart(self, tenant: Hashable) -> Hashable:
        return tenant if self.tenant_share < 1 else None

    def _make_room(self, parent: K | None, tenant: Hashable) -> bool:
        """Evict from the block's tenant while that has its share, then from any tenant."""
        if parent is not None:
            self.pin(parent)  # what is to come needs it
        try:
            while self._num_held[tenant] >= self._most_of_a_tenant:
                if not self._evict_one([tenant]):
                    return False
            return len(self._last_use) < self.capacity or self._evict_one(list(self._heaps))
        finally:
            if parent is not None:
                self.unpin(parent)

    def _evict_one(self, tenants: Sequence[Hashable]) -> bool:
        """The block that was used the longest ago, of these tenants."""
        oldest = min(filter(None, map(self._least_recently_used, tenants)), default=None)
        if oldest is None:
            return False
        victim = oldest[2]
        heapq.heappop(self._heaps[self._tenants[victim]])
        self._in_heap.discard(victim)
        self._drop(victim)
        self.on_evict(victim)
        self._remember(victim)
        return True

    def _remember(self, key: K) -> None:
        self._gone[key] = None
        if len(self._gone) > self.capacity:
            self._gone.popitem(last=False)

    def _least_recently_used(self, tenant: Hashable) -> Entry[K] | None:
        heap = self._heaps.get(tenant)
        while heap:
            last_use, _, key = heap[0]
            can_leave = key in self._last_use and not self._is_held(key)
            if can_leave and self._last_use[key] == last_use:
                return heap[0]
            heapq.heappop(heap)
            self._in_heap.discard(key)
            self._let_go(key)
        return None

    def _is_held(self, key: K) -> bool:
        return bool(self._children[key]) or key in self._pins

    def _let_go(self, key: K) -> None:
        """Put a block into the heap if it can leave."""
        if key in self._last_use and key not in self._in_heap and not self._is_held(key):
            self._in_heap.add(key)
            self._num_pushed += 1
            heap = self._heaps.setdefault(self._tenants[key], [])
            heapq.heappush(heap, (self._last_use[key], self._num_pushed, key))

    def _add(self, key: K, parent: K | None, tenant: Hashable) -> None:
        self._last_use[key] = self._now
        self._tenants[key] = tenant
        self._num_held[tenant] += 1
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
        tenant = self._tenants.pop(key)
        self._num_held[tenant] -= 1
        if not self._num_held[tenant]:
            self._forget_tenant(tenant)
        if parent is not None:
            self._children[parent].discard(key)
            self._let_go(parent)

    def _forget_tenant(self, tenant: Hashable) -> None:
        del self._num_held[tenant]
        self._in_heap.difference_update(key for _, _, key in self._heaps.pop(tenant, ()))
