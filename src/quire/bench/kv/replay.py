"""A tier without bytes: what would have hit if a policy had chosen what to keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.kv.policy import Policy


class Blocks(Protocol):
    def __contains__(self, block: int, /) -> bool: ...


def count_hits(policy: Policy[int], requests: Iterable[Sequence[int]]) -> int:
    """Serve requests one after the other; each offers all of its blocks when it is done."""
    hits = 0
    for request in requests:
        found = cached_prefix(request, policy)
        hits += found
        policy.use(request)
        parent = request[found - 1] if found else None
        for block in request[found:]:
            if not policy.offer(block, parent):
                break  # what comes behind it could not be found
            parent = block
    return hits


def cached_prefix(request: Sequence[int], cached: Blocks) -> int:
    """How many of a request's first blocks are there; behind a gap nothing can be used."""
    for at, block in enumerate(request):
        if block not in cached:
            return at
    return len(request)
