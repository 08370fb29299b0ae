"""Belady's algorithm: eviction that knows every request to come, as a bound for all policies."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence

from quire.bench.kv.replay import cached_prefix

NEVER = 1 << 62
SMALL_HEAP = 1024


def count_belady_hits(
    requests: Iterable[Sequence[int]], next_uses: Sequence[int], capacity: int
) -> int:
    """Blocks that hit as part of a cached prefix when those needed last are let go first.

    A request's blocks come in together, then as many leave as are too many, new ones or old. A
    block counts by the next request that needs it, whatever its place in that request: of blocks
    needed at the same time the one with the smaller number goes. Tails first would hit a little
    more, but this is the choice that published figures mean.
    """
    cached: dict[int, int] = {}  # and the next request that needs it
    latest: list[tuple[int, int]] = []  # a heap of (−next request, block); some are out of date
    hits = at = 0
    for request in requests:
        hits += cached_prefix(request, cached)
        for block in request:
            cached[block] = next_uses[at]
            heapq.heappush(latest, (-next_uses[at], block))
            at += 1
        while len(cached) > capacity:
            needed, block = heapq.heappop(latest)
            if cached.get(block) == -needed:
                del cached[block]
        if len(latest) > 2 * len(cached) + SMALL_HEAP:
            # Entries out of date name the near past and never come up: they would only collect.
            latest = [(-needed, block) for block, needed in cached.items()]
            heapq.heapify(latest)
    return hits


def find_next_uses(blocks: Sequence[int], requests: Iterable[Sequence[int]]) -> array[int]:
    """For every block of every request, the number of the next request with that block."""
    found = array("q", [NEVER]) * len(blocks)
    last_seen: dict[int, int] = {}  # where the block stood
    at = 0
    for number, request in enumerate(requests):
        for block in request:
            if (before := last_seen.get(block)) is not None:
                found[before] = number
            last_seen[block] = at
            at += 1
    return found
