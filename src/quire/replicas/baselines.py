"""Routers that look at no block, to compare others with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from quire.kv.events import BlockEvents
from quire.replicas.routing import RoutingDecision, Sent


class _Blind:
    def join(self, replica: str) -> None:
        pass

    def leave(self, replica: str) -> None:
        pass

    def apply(self, replica: str, events: BlockEvents) -> None:
        pass

    def begin(self, replica: str, keys: Sequence[bytes]) -> Sent:
        return Sent()

    def end(self, sent: Sent) -> None:
        pass


class RandomRouter(_Blind):
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, float]) -> RoutingDecision:
        return RoutingDecision(self._random.choice(list(loads)), 0)


class RoundRobinRouter(_Blind):
    def __init__(self) -> None:
        self._turn = 0

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, float]) -> RoutingDecision:
        names = list(loads)
        name = names[self._turn % len(names)]
        self._turn += 1
        return RoutingDecision(name, 0)
