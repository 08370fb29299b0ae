"""The ways of routing, by name."""

from __future__ import annotations

from quire.replicas.baselines import RandomRouter, RoundRobinRouter
from quire.replicas.prefix_router import PrefixRouter
from quire.replicas.routing import Router

ROUTING = ("prefix", "round_robin", "random")


def make_router(routing: str, block_size: int) -> Router:
    if routing == "prefix":
        return PrefixRouter(block_size)
    return RoundRobinRouter() if routing == "round_robin" else RandomRouter()
