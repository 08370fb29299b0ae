"""The policy of the tiers: keep what is likeliest to be asked for soon, as learned so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from quire.kv.policy.known_blocks import NO_RUN, NONE, RESIDENT, SEEN, UNWANTED, KnownBlocks
from quire.kv.policy.protocol import K, nobody_listens
from quire.kv.policy.reuse_model import ReuseModel
from quire.kv.policy.shelves import Run, Shelves

# Classes. A block that came back is known by its number of uses: 2, 3 to 4, 5 to 8, … 513 and more.
# A new one is known by its request: how many requests its chain grew out of, one behind the other
# (a third turn of a talk is likelier to be followed by another than a first), and whether it is the
# request's last block, which is seldom full and then matches nothing.
LARGEST_USE_CLASS = 10
OLDEST_GENERATION = 3
NUM_CLASSES = LARGEST_USE_CLASS + 2 * OLDEST_GENERATION
MOST_USES = 1 << LARGEST_USE_CLASS - 1  # more are not counted
CLASS_OF_NEW = [LARGEST_USE_CLASS + 2 * (born - 1) for born in range(OLDEST_GENERATION + 1)]
CLASS_AFTER = [uses.bit_length() - 1 for uses in range(MOST_USES + 1)]  # that many uses
NEXT_GENERATION = [min(now + 1, OLDEST_GENERATION) for now in range(OLDEST_GENERATION + 1)]

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

    def __init__(self, capacity: int, most_ghosts: int | None = None) -> None:
        self.capacity = capacity
        self.on_evict: Callable[[K], None] = nobody_listens
        if most_ghosts is None:
            most_ghosts = min(max(GHOSTS_PER_BLOCK * capacity, FEWEST_GHOSTS), MOST_GHOSTS)
        self._most_ghosts = most_ghosts
        self._num_resident = 0
        self._known: KnownBlocks[K] = KnownBlocks()
        self._pins: dict[K, int] = {}
        self._now = 0  # requests since the start
        self._model = ReuseModel(NUM_CLASSES, HALF_LIVES)
        self._shelves = Shelves(self._model)
        self._learn_every = min(max(capacity, LEARN_EVERY[0]), LEARN_EVERY[1])
        self._learned_at = 0
        self._num_asked = 0  # blocks since then
        self._recent_requests = self._recent_blocks = 0.0  # for the mean length of a request

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
        self._gather(keys)
        self._forget_oldest()
        self._now += 1
        self._num_asked += len(keys)
        if self._num_asked >= self._learn_every:
            self._learn()

    def restore(self, keys: Sequence[K], parents: Sequence[K]) -> None:
        self._known.restore(keys, parents)
        self._num_resident = len(keys)
        new = CLASS_OF_NEW[1] * self._model.num_ages
        for first in range(0, len(keys), RESTORED_TOGETHER):
            run = Run(new, self._now)
            # In a run the head comes first: the most recently used.
            run.rows = list(range(first, min(first + RESTORED_TOGETHER, len(keys))))[::-1]
            run.num_left = run.num_resident = len(run.rows)
            self._known.run[first : first + RESTORED_TOGETHER] = [run] * len(run.rows)
            self._shelves.append(run)

    def offer(self, key: K, parent: K | None) -> bool:
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
            row = self._add_behind(key, above)
        known.attach(row, above)  # before anyone has to leave: a parent is then no candidate
        if self._num_resident >= self.capacity and not self._make_room(row):
            self._detach(row)
            known.state[row] = UNWANTED
            return False
        known.state[row] = RESIDENT
        self._num_resident += 1
        run = known.run[row]
        run.num_resident += 1
        run.end = len(run.rows)
        if run.num_resident == 1 or run.is_held:  # else it is on its shelf
            run.is_held = False
            self._shelves.put(run)
        return True

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

    # A request's blocks become runs

    def _gather(self, keys: Sequence[K]) -> None:
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
        self._make_runs(rows)

    def _make_runs(self, rows: list[int]) -> None:
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
            if run is None or block_class != run_class:
                if run is not None:
                    self._shelves.append(run)
                run_class = block_class
                run = Run(run_class * num_ages, self._now)
            run.rows.append(row)
            run.num_left += 1
            run_of[row] = run
            if state[row] == RESIDENT:
                run.num_resident += 1
        assert run is not None
        self._shelves.append(run)

    def _add_behind(self, key: K, parent: int) -> int:
        """A block that no request asked for, an answer's, belongs to the use of its parent."""
        known = self._known
        generation = 1
        if parent != NONE:
            generation = known.generation[parent]
            if known.uses[parent] > 1:
                generation = NEXT_GENERATION[generation]
        run = self._run_behind(parent, CLASS_OF_NEW[generation])
        row = known.add(key, run, generation)
        known.uses[row] = 1
        run.rows.append(row)
        run.num_left += 1
        self._model.reached[run.cell] += 1
        return row

    def _run_behind(self, parent: int, block_class: int) -> Run:
        """The parent's own run if it ends there and is of this class, else a new one."""
        num_ages = self._model.num_ages
        if parent != NONE:
            run = self._known.run[parent]
            is_alike = run.cell // num_ages == block_class and not run.is_past_memory
            if is_alike and run.rows[-1] == parent:
                return run
        run = Run(block_class * num_ages, self._now)
        self._shelves.append(run)
        return run

    # Who has to leave

    def _make_room(self, row: int) -> bool:
        """Let the least valuable block go, unless it is worth more than the one that comes."""
        victim = self._victim()
        if victim == NONE:
            return False
        value, run_of = self._model.value, self._known.run
        if value[run_of[victim].cell] > value[run_of[row].cell]:
            return False
        key = self._known.keys[victim]
        assert key is not None
        self._drop(victim, UNWANTED)
        self.on_evict(key)
        return True

    def _victim(self) -> int:
        """The last resident block of the first run that can spare one."""
        run_of, state = self._known.run, self._known.state
        while (run := self._shelves.first()) is not None:
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
        known.state[row] = state
        run.num_resident -= 1
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
            run.is_held = False
            self._shelves.put(run)

    # What time does

    def _grow_older(self) -> None:
        run_of = self._known.run
        for run in self._shelves.grow_older(self._now):
            run.rows = [row for row in run.rows if run_of[row] is run]
            run.end = len(run.rows)

    def _forget_oldest(self) -> None:
        """Keep the ghosts within their number, but for those of the request at hand."""
        known = self._known
        while len(known) - self._num_resident > self._most_ghosts:
            run = self._shelves.pop_oldest(before=self._now)
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
        self._shelves.reorder()
        self._learned_at, self._num_asked = self._now, 0
