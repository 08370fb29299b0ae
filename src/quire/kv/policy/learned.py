"""The policy of the tiers: keep what is likeliest to be asked for soon, as learned so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic

from quire.kv.policy.ages import Ages
from quire.kv.policy.classes import CLASS_OF_NEW, NUM_CLASSES
from quire.kv.policy.eviction_queues import EvictionQueues, Run
from quire.kv.policy.known_blocks import RESIDENT, SEEN, UNWANTED, KnownBlocks
from quire.kv.policy.need import NONE
from quire.kv.policy.protocol import K, ignore
from quire.kv.policy.reuse_model import ReuseModel
from quire.kv.policy.runs import Runs
from quire.kv.policy.tenants import Tenants

GHOSTS_PER_BLOCK = 8
FEWEST_GHOSTS, MOST_GHOSTS = 1 << 16, 1 << 20  # of 280 bytes each: 18 MB, 290 MB
HALF_LIVES = (4, 16, 64)  # of the model's memories, in times the capacity
RESTORED_TOGETHER = 256  # blocks of one run: what a restart leaves of the order of their use
LEARN_EVERY = (512, 8192)  # blocks asked for: the capacity, but within these


class LearnedPolicy(Generic[K]):
    """Evicts the tail block of least value, and keeps a new one out that is worth less than that.

    What a block is worth is said by `ReuseModel`. Ghosts, blocks that are remembered without being
    resident, teach it what would have hit: without them it would only know of its own choices.
    """

    def __init__(
        self, capacity: int, most_ghosts: int | None = None, tenant_share: float = 1.0
    ) -> None:
        self.tenant_share = tenant_share
        self.capacity = capacity
        self.on_evict: Callable[[K], None] = ignore
        if most_ghosts is None:
            most_ghosts = min(max(GHOSTS_PER_BLOCK * capacity, FEWEST_GHOSTS), MOST_GHOSTS)
        self._most_ghosts = most_ghosts
        self._num_resident = 0
        self._known: KnownBlocks[K] = KnownBlocks()
        self._pins: dict[K, int] = {}
        self._now = 0  # requests since the start
        self._model = ReuseModel(NUM_CLASSES, HALF_LIVES)
        self._ages = Ages(self._model)
        self._runs = Runs(self._known, self._model, self._ages)
        self._tenants = Tenants(self._model, have_quotas=tenant_share < 1)
        self._learn_every = min(max(capacity, LEARN_EVERY[0]), LEARN_EVERY[1])
        self._learned_at = 0
        self._num_asked = 0  # blocks since then
        self._recent_requests = self._recent_blocks = 0.0  # for the mean length of a request

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._capacity = capacity
        self._most_each = int(self.tenant_share * capacity)

    def __len__(self) -> int:
        return self._num_resident

    def __contains__(self, key: K) -> bool:
        row = self._known.rows.get(key)
        return row is not None and self._known.state[row] == RESIDENT

    @property
    def num_ghosts(self) -> int:
        return len(self._known) - self._num_resident

    def use(self, keys: Sequence[K]) -> None:
        if not keys or not self.capacity:  # a tier without room has nothing to choose
            return
        self._grow_older()
        self._runs.gather(keys, self._now)
        self._forget_oldest(before=self._now)
        self._now += 1
        self._num_asked += len(keys)
        if self._num_asked >= self._learn_every:
            self._learn()

    def restore(self, keys: Sequence[K], parents: Sequence[K], tenants: Sequence[Hashable]) -> None:
        order = self._known.restore(keys, parents)
        self._num_resident = len(keys)
        new = CLASS_OF_NEW[1] * self._model.num_ages
        for first in range(0, len(keys), RESTORED_TOGETHER):
            together = order[first : first + RESTORED_TOGETHER]
            for queues, rows in self._tenants.apart(together, tenants):
                run = Run(new, born=first / len(keys) - 1)
                run.rows = rows[::-1]  # in a run the head comes first
                run.num_left = run.num_resident = len(rows)
                run.queues = queues
                queues.num_resident += len(rows)
                for row in rows:
                    self._known.run[row] = run
                self._ages.append(run)
        for queues in self._tenants.all():
            self._cut_down(queues)

    def offer(self, key: K, parent: K | None, tenant: Hashable = None) -> bool:
        known = self._known
        row = known.rows.get(key)
        if row is not None and known.state[row] == RESIDENT:
            return True
        if not self.capacity:
            return False
        above = NONE if parent is None else known.rows.get(parent, NONE)
        if above != NONE and known.state[above] != RESIDENT:
            if known.state[above] == UNWANTED:
                return False
            above = NONE
        if row is None:
            row = self._runs.add_behind(key, above, self._now)
        known.attach(row, above)  # before a victim is chosen: a parent is then no candidate
        run, queues = known.run[row], self._tenants.queues_of(tenant)
        if run.num_resident and run.queues is not queues:
            run = self._runs.set_apart(row, self._now)
        is_full = self._num_resident >= self._capacity or queues.num_resident >= self._most_each
        if is_full and not self._make_room(row, queues):
            self._detach(row)
            known.state[row] = UNWANTED
            self._forget_oldest(before=self._now + 1, but=run)
            return False
        known.state[row] = RESIDENT
        self._num_resident += 1
        queues.num_resident += 1
        run.queues = queues
        run.num_resident += 1
        run.end = len(run.rows)
        if run.num_resident == 1 or run.is_held:  # else it is in its queue
            run.is_held = False
            queues.put(run)
        self._forget_oldest(before=self._now + 1, but=run)
        return True

    def has_its_share(self, tenant: Hashable) -> bool:
        has_quota = self.tenant_share < 1
        return has_quota and self._tenants.queues_of(tenant).num_resident >= self._most_each

    def pin(self, key: K) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: K) -> None:
        pins = self._pins.pop(key)
        if pins > 1:
            self._pins[key] = pins - 1
        else:
            row = self._known.rows.get(key)
            if row is not None:
                self._release(row)

    def remove(self, key: K) -> None:
        if key in self:
            row = self._known.rows[key]
            self._known.orphan(row)
            self._drop(row, SEEN)

    # Eviction

    def _make_room(self, row: int, queues: EvictionQueues) -> bool:
        """Evict from the block's tenant while that has its share, then from any tenant."""
        while queues.num_resident >= self._most_each:
            if not self._let_go_for(row, queues):
                return False
        return self._num_resident < self._capacity or self._let_go_for(row, self._tenants)

    def _let_go_for(self, row: int, queues: EvictionQueues | Tenants) -> bool:
        """Let the least valuable block go, unless it is worth more than the one that comes."""
        victim = self._victim(queues)
        if victim == NONE:
            return False
        value, run_of = self._model.value, self._known.run
        if value[run_of[victim].cell] > value[run_of[row].cell]:
            return False
        self._evict(victim)
        return True

    def _cut_down(self, queues: EvictionQueues) -> None:
        """Let all go that a tenant has beyond its share."""
        most = self._most_each
        while queues.num_resident > most and (victim := self._victim(queues)) != NONE:
            self._evict(victim)

    def _evict(self, row: int) -> None:
        key = self._known.keys[row]
        assert key is not None
        self._drop(row, UNWANTED)
        self.on_evict(key)

    def _victim(self, queues: EvictionQueues | Tenants) -> int:
        """The last resident block of the first run that can spare one."""
        run_of, state = self._known.run, self._known.state
        while (run := queues.first()) is not None:
            at = run.end - 1
            while run_of[row := run.rows[at]] is not run or state[row] != RESIDENT:
                at -= 1
            run.end = at + 1
            if not self._is_held(row):
                return row
            run.is_held = True
        return NONE

    def _is_held(self, row: int) -> bool:
        return self._known.first_child[row] != NONE or self._known.keys[row] in self._pins

    def _drop(self, row: int, state: int) -> None:
        known = self._known
        run = known.run[row]
        assert run.queues is not None
        known.state[row] = state
        run.num_resident -= 1
        run.queues.num_resident -= 1
        self._num_resident -= 1
        self._detach(row)
        if run.is_past_memory:
            run.num_left -= 1
            known.forget(row)

    def _detach(self, row: int) -> None:
        parent = self._known.detach(row)
        if parent != NONE:
            self._release(parent)

    def _release(self, row: int) -> None:
        """Something that held this block is gone."""
        run = self._known.run[row]
        if run.is_held and not self._is_held(row):
            assert run.queues is not None
            run.is_held = False
            run.queues.put(run)

    # Ageing and learning

    def _grow_older(self) -> None:
        run_of = self._known.run
        for run in self._ages.grow_older(self._now):
            run.rows = [row for row in run.rows if run_of[row] is run]
            run.end = len(run.rows)

    def _forget_oldest(self, before: int, but: Run | None = None) -> None:
        """Keep the ghosts within their number, but for those of the request at hand: those of its
        time, or of the run that a block was offered in."""
        known = self._known
        while len(known) - self._num_resident > self._most_ghosts:
            run = self._ages.pop_oldest(before, but)
            if run is None:
                return
            run.is_past_memory = True
            for row in run.rows:
                if known.run[row] is run and known.state[row] != RESIDENT:
                    known.forget(row)
                    run.num_left -= 1

    def _learn(self) -> None:
        self._recent_requests = 0.9 * self._recent_requests + self._now - self._learned_at
        self._recent_blocks = 0.9 * self._recent_blocks + self._num_asked
        elapsed = self._num_asked / self.capacity
        self._model.learn(elapsed, self._recent_blocks / self._recent_requests)
        self._tenants.reorder()
        self._learned_at, self._num_asked = self._now, 0
