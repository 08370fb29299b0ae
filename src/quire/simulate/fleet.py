"""Replicas behind a router, in the order of events: a request arrives, or a replica acts.

A heap has the next moment of each replica. Replicas touch each other only through the router and
the remote store, so one that has nothing to decide is not looked at until it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.kv.block_log import Place
from quire.kv.keys import Namespace
from quire.kv.policy import LearnedPolicy, LRUPolicy, Policy
from quire.kv.prefix import PrefixCache
from quire.replicas.baselines import RandomRouter
from quire.replicas.prefix_router import PrefixRouter
from quire.replicas.routing import Router
from quire.simulate.clock import Clock
from quire.simulate.costs import StepCosts
from quire.simulate.dispatch import Dispatch
from quire.simulate.replica import Answered, Replica
from quire.simulate.store import TimedStore
from quire.simulate.tiers import PolicyTier, RemoteTier, SharedStore
from quire.simulate.trace import Arrival

POLICIES: dict[str, Callable[[int], Policy[bytes]]] = {"lru": LRUPolicy, "policy": LearnedPolicy}
ROUTERS: dict[str, Callable[[int, int], Router]] = {
    "random": lambda block_size, seed: RandomRouter(seed),
    "prefix": lambda block_size, seed: PrefixRouter(block_size),
}


@dataclass(frozen=True)
class Setup:
    """What is compared. Tiers are in blocks, of each replica but for the remote one; 0 is none."""

    num_replicas: int
    num_blocks: int  # of each device
    block_size: int
    max_num_batched_tokens: int = 16_384
    max_num_seqs: int = 512
    policy: str = "policy"
    router: str = "prefix"
    host: int = 0
    ssd: int = 0
    remote: int = 0
    seed: int = 0
    fast_forwards: bool = True


class Fleet:
    def __init__(self, setup: Setup, costs: StepCosts) -> None:
        self.setup = setup
        self.costs = costs
        self._shared = SharedStore(setup.remote)
        shape = f"{costs.token_bytes} bytes a token"
        self._namespace = Namespace("simulated", "", "", setup.block_size, shape, "")
        self.replicas = [self._replica(number) for number in range(setup.num_replicas)]
        router = ROUTERS[setup.router](setup.block_size, setup.seed)
        self.dispatch = Dispatch(
            router, self.replicas, self._namespace, listens=setup.router == "prefix"
        )

    def _replica(self, number: int) -> Replica:
        setup, clock = self.setup, Clock()
        return Replica(
            number,
            clock,
            self.costs,
            PrefixCache(setup.num_blocks, setup.block_size),
            self._namespace,
            setup.max_num_batched_tokens,
            setup.max_num_seqs,
            self._store(clock) if setup.host or setup.ssd or setup.remote else None,
            setup.fast_forwards,
        )

    def _store(self, clock: Clock) -> TimedStore:
        setup, machine, policy = self.setup, self.costs.machine, POLICIES[self.setup.policy]
        host = PolicyTier(Place.HOST, policy(setup.host), machine.host_read, machine.host_write)
        below: list[PolicyTier | RemoteTier] = []
        if setup.ssd:
            rates = machine.ssd_read, machine.ssd_write
            below.append(PolicyTier(Place.SSD, policy(setup.ssd), *rates))
        if setup.remote:
            below.append(RemoteTier(self._shared, machine.remote_read, machine.remote_write))
        size = setup.block_size * self.costs.token_bytes
        return TimedStore(clock, self._namespace, size, host, below, machine.remote_latency)

    def run(self, arrivals: Iterable[Arrival]) -> list[Answered]:
        """Answer them all, however long it takes; in the order of their arrival."""
        moments: list[tuple[float, int]] = []  # of replicas, some of them out of date
        for arrival in arrivals:
            self._act(moments, until=arrival.at)
            replica = self.dispatch.send(arrival)
            assert replica.wakes_at is not None
            heapq.heappush(moments, (replica.wakes_at, replica.number))
        self._act(moments, until=float("inf"))
        answered = [each for replica in self.replicas for each in replica.answered]
        return sorted(answered, key=lambda each: (each.arrived, each.replica))

    def _act(self, moments: list[tuple[float, int]], until: float) -> None:
        """Wake every replica that is due before the next arrival."""
        while moments and moments[0][0] < until:
            moment, number = heapq.heappop(moments)
            replica = self.replicas[number]
            if replica.wakes_at != moment:
                continue  # a request came meanwhile, and it woke earlier
            self.dispatch.hear(replica)
            replica.wake()
            if replica.wakes_at is not None:
                heapq.heappush(moments, (replica.wakes_at, number))

    @property
    def num_refused(self) -> int:
        return sum(replica.num_refused for replica in self.replicas)
