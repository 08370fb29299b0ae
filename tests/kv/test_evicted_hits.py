"""A hit that is evicted between look-up and use is pinned, or a miss: never wrong, never a crash.

At each point between `match` and the end of a load everything is evicted that can be, and what it
lay in is filled with other bytes. Host memory is full from the start.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from patience import PATIENCE_S
from redis_server import RedisServer

from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.policy import LRUPolicy
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory
from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import PAGE

BLOCK, IMAGE, CAPACITY, PASSING = 4, 5000, 12, 6
COUNT = 10  # blocks of the prompt that is looked for
TOKENS = np.arange(COUNT * BLOCK, dtype=np.int32)
OTHERS = np.arange(1000, 1000 + 4 * CAPACITY * BLOCK, dtype=np.int32)
NAMESPACE = Namespace("model", "float32", "float32", BLOCK, "layout", "rope")
POINTS = ["after the match", "before the read", "after the read", "before the copy", "after it"]


class Cache:
    """A store over one real tier at the most, and a way to evict all of it."""

    def __init__(self, place, folder):
        self.place = place
        torch.manual_seed(0)
        self.pool = ImagePool(torch.randint(0, 255, (32, IMAGE), dtype=torch.uint8))
        self.wanted = self.pool.images[:COUNT].clone()
        self.server = RedisServer(folder) if place == "remote" else None
        self.tier = self._open_tier(folder)
        memory = HostMemory(IMAGE, CAPACITY + PASSING, pinned=False)
        self.host = HostTier(memory, LRUPolicy(CAPACITY))
        tiers = [self.tier] if self.tier is not None else []
        self.store = KVStore(self.pool, NAMESPACE, self.host, tiers)
        self.others = self.store.names(OTHERS)

    def _open_tier(self, folder):
        if self.place == "ssd":
            quota = Geometry(IMAGE, BLOCK).quota_for(COUNT + 1)
            return SsdTier([folder / "ssd"], quota, IMAGE, BLOCK)
        return open_remote(self.server.url, IMAGE, BLOCK) if self.server is not None else None

    def fill(self):
        """Only `place` has the prompt; host memory is full, of it or of others."""
        assert self.store.put(TOKENS, list(range(COUNT))).wait(PATIENCE_S)
        assert self.store.flush(PATIENCE_S)
        if self.place != "host":
            self.host.clear()
        self._fill_host()
        self.pool.images.zero_()

    def evict(self):
        """All blocks that no table holds, and then overwrite them."""
        self.host.clear()
        self._fill_host()
        if self.place == "ssd":
            names, size = self.others[: COUNT + 1], -(-IMAGE // PAGE) * PAGE
            self.tier.write(names, [memoryview(b"\xee" * size)] * len(names))
        if self.place == "remote":
            self.server.plain.flushall()

    def _fill_host(self):
        """With images of others, until there is no room."""
        for name in self.others:
            if len(self.host) == CAPACITY:
                break
            for slot in self.host.take(1):
                self.host.memory.buffer(slot)[:] = b"\xee" * self.host.memory.stride
                self.host.keep([name], [slot])
                self.host.release([slot])

    def evict_at(self, point):
        if self.tier is not None:
            self.tier.read = self._around(self.tier.read, "the read", point)
        self.pool.from_host = self._around(self.pool.from_host, "the copy", point)

    def _around(self, call, name, point):
        def evicting(*args):
            if point == f"before {name}":
                self.evict()
            result = call(*args)
            if point == f"after {name}" or (point == "after it" and name == "the copy"):
                self.evict()
            return result

        return evicting

    def close(self):
        self.store.close()
        if self.server is not None:
            self.server.kill()


@pytest.fixture(params=["host", "ssd", "remote"])
def cache(request, tmp_path):
    cache = Cache(request.param, tmp_path)
    cache.fill()
    yield cache
    cache.close()


@pytest.mark.parametrize("point", POINTS)
def test_evicted_between_look_up_and_use(cache, point, caplog):
    store, host = cache.store, cache.host
    assert len(host) == CAPACITY
    cache.evict_at(point)
    match = store.match(TOKENS)
    assert match.wait(PATIENCE_S)
    assert match.places == [cache.place] * COUNT
    if point == "after the match":
        cache.evict()
    load = match.load(list(range(COUNT)))
    assert load.wait(PATIENCE_S)
    there = load.num_loaded
    assert torch.equal(cache.pool.images[:there], cache.wanted[:there])
    is_too_early = cache.place != "host" and point in ("after the match", "before the read")
    if is_too_early:
        assert there == 0
    elif cache.place == "host":
        assert there == COUNT  # it was held
    else:
        assert there >= PASSING  # as many as are read before anything is evicted
    assert "A cache transfer failed" not in caplog.text
    assert store.flush(PATIENCE_S) and not host._held
    assert len(host) + len(host._free) == host.memory.num_slots


def test_evicted_while_prefetched(cache, caplog):
    """A prefetch that comes too late finds nothing, and says nothing."""
    cache.evict_at("before the read")
    cache.store.prefetch(cache.store.names(TOKENS))
    assert all(queue.close(10) for queue in cache.store._loader._reads.values())
    assert "A cache transfer failed" not in caplog.text
    assert not cache.host._held
