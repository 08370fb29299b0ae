"""A `Store` without threads and without bytes, whose copies take simulated time.

    load    host ─────────────▶ device       put    device ─▶ host ─▶ SSD, remote
            SSD, remote ▶ host ▶ device

A copy is over when its bytes have gone through the pipes on its way, one pipe after the other. What
it brings is found from then on: `_catch_up` does what has become due since the last call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kv.block_log import BlockLog
from quire.kv.foreground import Foreground
from quire.kv.grouped_match import GroupedMatch, OnDevice, nothing_there
from quire.kv.hit_rule import Window
from quire.kv.image import BlockName
from quire.kv.job_queue import Handle
from quire.kv.keys import Namespace, chain_keys
from quire.kv.loads import Found, Load
from quire.kv.pools.block_pool import Blocks
from quire.kv.puts import MOST_WAITING, PIECE_BYTES, Names, Put
from quire.kv.rates import Rates
from quire.kv.store import ASK_DEADLINE_S
from quire.kv.tier_match import Answer, Keys, TierMatch
from quire.simulate.clock import Clock
from quire.simulate.tiers import PolicyTier, RemoteTier


class _Timed(Handle):
    """A handle that is over at a moment which is known from the start."""

    clock: Clock
    end_at = 0.0

    def done(self) -> bool:
        return self.clock.now >= self.end_at


class TimedLoad(_Timed, Load):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._num_blocks = num_blocks

    @property
    def num_loaded(self) -> int:
        return self._num_blocks

    @property
    def is_whole(self) -> bool:
        return True

    @property
    def arrived(self) -> list[bool]:
        return [True] * self._num_blocks


class TimedPut(_Timed, Put):
    pass


class TimedAnswer(_Timed, Answer):
    pass


class Ends:
    """The moments at which something ends: waiting for the next of them is moving the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moments: list[float] = []

    def add(self, moment: float) -> None:
        heapq.heappush(self._moments, moment)

    def wait_for_any(self, timeout: float) -> None:
        clock, moments = self._clock, self._moments
        while moments and moments[0] <= clock.now:
            heapq.heappop(moments)
        clock.now = min([clock.now + timeout, *moments[:1]])

    def of(self, *kinds: type[Handle]) -> list[Handle]:
        raise NotImplementedError("no request of a simulation is handed over")


class TimedStore:
    """The `Store` of one replica."""

    def __init__(
        self,
        clock: Clock,
        namespace: Namespace,
        block_bytes: int,
        host: PolicyTier,
        below: Sequence[PolicyTier | RemoteTier],
        remote_latency: float,
    ) -> None:
        self.clock = clock
        self.namespace = namespace
        self.rates = Rates(clock)
        self.foreground = Foreground()  # a simulation has no other threads that could wait
        self.host = host
        self.handles = Ends(clock)
        self._block_bytes = block_bytes
        self._below = {tier.name: tier for tier in below}
        self._near = [tier for tier in below if isinstance(tier, PolicyTier)]
        self._far = [tier for tier in below if isinstance(tier, RemoteTier)]
        self._latency = remote_latency
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._held: dict[int, bytes] = {}  # blocks of host memory that a match or a load holds

    # --- what Tiering calls -----------------------------------------------------------------------

    def may_have(self, key: bytes) -> bool:
        self._catch_up()
        return bool(self._far or self.locate([key], hold=False))

    def match_names(self, names: Sequence[BlockName], patience: float | None = None) -> TierMatch:
        self._catch_up()
        return TierMatch(self, names, ASK_DEADLINE_S if patience is None else patience)

    def match_groups(
        self,
        windows: Sequence[Window],
        names: Sequence[BlockName],
        first: int = 0,
        reached: int = 0,
        on_device: OnDevice = nothing_there,
        patience: float | None = None,
    ) -> GroupedMatch:
        self._catch_up()
        seconds, size = ASK_DEADLINE_S if patience is None else patience, self.namespace.block_size
        return GroupedMatch(self, windows, size, names, first, reached, on_device, seconds)

    def put_names(self, names: Names, blocks: Sequence[int], *, is_computed: bool = False) -> Put:
        self._catch_up()
        named = names() if callable(names) else names
        new = [name for name in named if name.key not in self.host]
        put = TimedPut()
        put.clock = self.clock
        if new:
            put.end_at = self.host.writes.send(self._bytes(new), self.clock.now)
            self.handles.add(put.end_at)
            self._later(put.end_at, partial(self._arrive, new))
        return put

    def prefetch(self, names: Sequence[BlockName]) -> None:
        self._catch_up()
        if not self.host.policy.capacity:
            return
        found = self.locate([name.key for name in names], hold=False)
        for place, tier in self._below.items():
            there = zip(names, found, strict=False)
            wanted = [name for name, each in there if each.place == place]
            if wanted:
                end = tier.reads.send(self._bytes(wanted), self.clock.now)
                self._later(end, partial(self.host.keep, wanted))

    def use(
        self,
        keys: Sequence[bytes],
        parent: bytes = b"",
        behind: Sequence[bytes] = (),
        of_groups: Callable[[list[bytes]], list[bytes]] | None = None,
    ) -> None:
        self._catch_up()
        asked = [*keys, *chain_keys(parent, behind)]
        if of_groups is not None:
            asked = of_groups(asked)
        self.host.use(asked)
        for tier in self._below.values():
            tier.use(asked)

    def root(self, salt: str) -> bytes:
        return self.namespace.root_of(salt)

    def publish_events(self, log: BlockLog) -> None:
        """Tell `log` of host memory and SSD; the remote store belongs to no replica."""
        for tier in [self.host, *self._near]:
            tier.publish_events(log)

    def withdraw(self, load: Load) -> Handle:
        """Its blocks are free when it is over: a copy that was begun goes on to its end."""
        return load

    def leave_device(self, timeout: float) -> bool:
        raise NotImplementedError("no step of a simulation fails")

    def close(self) -> None:
        """There is nothing to let go of."""

    def slot_states(self) -> dict[str, npt.NDArray[np.uint8]]:
        """No tier has slots."""
        return {}

    def stats(self) -> dict[str, Any]:
        return {name: {} for name in (self.host.name, *self._below)}

    # --- for matches ------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes], hold: bool = True) -> list[Found]:
        found: list[Found] = []
        for key in keys:
            if key in self.host:
                found.append(self._found_in_host(key) if hold else Found(self.host.name))
                continue
            tier = next((tier for tier in self._near if key in tier), None)
            if tier is None:
                break
            found.append(Found(tier.name))
        return found

    def _found_in_host(self, key: bytes) -> Found:
        number = next(self._numbers)
        self._held[number] = key
        self.host.policy.pin(key)
        return Found(self.host.name, number)

    def ask(self, keys: Keys, first: int, patience: float) -> list[Answer]:
        now, answers = self.clock.now, list[Answer]()
        if not self._far:
            return answers
        for tier in self._far:
            answer = TimedAnswer(tier.name, first, now + patience)
            answer.clock, answer.end_at = self.clock, now + self._latency
            if callable(keys):
                answer.holds = [key in tier for key in keys()]
            else:
                answer.holds = [True for _ in takewhile(tier.__contains__, keys)]
            self.handles.add(answer.end_at)
            answers.append(answer)
        return answers

    def load(
        self,
        names: Sequence[BlockName],
        found: Sequence[Found],
        blocks: Blocks,
        places: Sequence[int] | None = None,
    ) -> Load:
        self._catch_up()
        load = TimedLoad(len(names))
        load.clock, load.end_at = self.clock, self.clock.now
        by_place: dict[str, list[int]] = {}
        for at, each in enumerate(found):
            by_place.setdefault(each.place, []).append(at)
        for place, those in by_place.items():
            end = self._fetch(place, [names[at] for at in those])
            load.end_at = max(load.end_at, end)
            self._later(end, partial(self._observe, place, those[-1] + 1, end - self.clock.now))
        self._later(load.end_at, partial(self.release, found))
        self.handles.add(load.end_at)
        return load

    def release(self, found: Sequence[Found]) -> None:
        for each in found:
            if each.place == self.host.name:
                self.host.policy.unpin(self._held.pop(each.slot))

    # --- time -------------------------------------------------------------------------------------

    def _fetch(self, place: str, names: Sequence[BlockName]) -> float:
        """Bring blocks to the device; when they will be there."""
        size, at = self._bytes(names), self.clock.now
        if place != self.host.name:
            at = self._below[place].reads.send(size, at)
            self._later(at, partial(self.host.keep, names))
            # Pieces follow each other through both pipes: the second only adds its last piece.
            size = min(size, PIECE_BYTES)
        return self.host.reads.send(size, at)

    def _arrive(self, names: Sequence[BlockName]) -> None:
        """Blocks are in host memory: keep them there, and begin to write them to the tiers below.

        With too much waiting to be written to a tier, it does not get them.
        """
        now = self.clock.now
        self.host.keep(names)
        for tier in self._below.values():
            new = [name for name in names if name.key not in tier]
            if new and tier.writes.waiting(now) < MOST_WAITING * PIECE_BYTES:
                end = tier.writes.send(self._bytes(new), now)
                self._later(end, partial(tier.keep, new))

    def _observe(self, place: str, num_blocks: int, seconds: float) -> None:
        self.rates.observe(place, num_blocks, seconds)

    def _bytes(self, names: Sequence[BlockName]) -> int:
        return len(names) * self._block_bytes

    def _later(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._numbers), act))

    def _catch_up(self) -> None:
        """Do what became due, in its order and at its time."""
        now = self.clock.now
        while self._due and self._due[0][0] <= now:
            self.clock.now, _, act = heapq.heappop(self._due)
            act()
        self.clock.now = now
