"""Pin, delete and list, in every tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE_S, eventually

from quire.errors import KVError
from quire.kv import ImagePool, KVStore, Namespace, open_store
from quire.kv.policy.timed_pins import TimedPins

BLOCK, SIZE, BLOCKS = 16, 4096, 64
NAMESPACE = Namespace("model", "float16", "float16", BLOCK, "layout", "rope")


def tokens(number: int, blocks: int) -> list[int]:
    return [1000 * number + at for at in range(blocks * BLOCK)]


class Cache:
    """A store with host memory, a disk and an archive, over a pool whose blocks differ."""

    def __init__(self, folder: Path) -> None:
        images = torch.arange(BLOCKS, dtype=torch.uint8)[:, None].repeat(1, SIZE)
        self.pool = ImagePool(images)
        (folder / "archive").mkdir(exist_ok=True)
        self.folder = folder
        self.store: KVStore = open_store(
            self.pool,
            NAMESPACE,
            host_cache_bytes=24 * SIZE,
            ssd_cache_dir=str(folder / "ssd"),
            ssd_cache_bytes="4MiB",
            remote_cache_url=f"file://{folder}/archive?timeout=60",
        )

    def put(self, ids: list[int], salt: str = "") -> None:
        put = self.store.put(ids, range(len(ids) // BLOCK), salt)
        assert put.wait_until_kept(PATIENCE_S)

    def held(self, ids: list[int], salt: str = "") -> dict[str, int]:
        """Of this prefix, by tier."""
        keys = [name.key for name in self.store.names(ids, salt)]
        tiers = [self.store.host, *self.store.tiers]
        return {tier.name: sum(tier.contains(keys)) for tier in tiers}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path)
    yield cache
    cache.store.close()


def done(handle):
    assert handle.wait(PATIENCE_S)
    return handle.counts


def test_what_is_deleted_is_in_no_tier_and_never_comes_back(cache: Cache) -> None:
    """With all that continues it; what shares no prefix with it stays."""
    prefix, other = tokens(1, 3), tokens(2, 2)
    longer = prefix + tokens(5, 4)
    for ids in (longer, other):
        cache.put(ids)
    assert done(cache.store.control.delete(prefix)) == {"host": 7, "ssd": 7, "remote": 7}
    assert cache.held(longer) == {"host": 0, "ssd": 0, "remote": 0}
    assert cache.held(other) == {"host": 2, "ssd": 2, "remote": 2}
    cache.store.close()
    again = Cache(cache.folder)
    try:
        assert again.held(longer) == {"host": 0, "ssd": 0, "remote": 0}
        assert again.held(other) == {"host": 0, "ssd": 2, "remote": 2}
        assert len(again.store.match(longer)) == 0 and len(again.store.match(other)) == 2
    finally:
        again.store.close()


def test_a_tenant_is_deleted_and_no_other(cache: Cache) -> None:
    for salt in ("", "acme", "other"):
        cache.put(tokens(1, 4), salt)
    control = cache.store.control
    assert done(control.delete_tenant("acme")) == {"host": 4, "ssd": 4, "remote": 4}
    for salt, left in (("", 4), ("acme", 0), ("other", 4)):
        assert set(cache.held(tokens(1, 4), salt).values()) == {left}
    assert done(control.delete_tenant("acme")) == {"host": 0, "ssd": 0, "remote": 0}
    data = b"".join(p.read_bytes() for p in (cache.folder / "archive").rglob("*") if p.is_file())
    assert cache.store.root("acme") not in data and cache.store.root("other") in data


def test_what_is_held_is_listed_by_root(cache: Cache) -> None:
    cache.put(tokens(1, 4))
    cache.put(tokens(1, 2), "acme")
    listing = cache.store.control.held()
    assert listing.wait(PATIENCE_S)
    wanted = {cache.store.control.root_of(""): 4, cache.store.control.root_of("acme"): 2}
    assert listing.blocks == {"host": wanted, "ssd": wanted, "remote": wanted}


def test_a_pinned_prefix_outlives_all_that_is_put(cache: Cache) -> None:
    pinned, plain = tokens(1, 3), tokens(2, 3)
    for ids in (pinned, plain):
        cache.put(ids)
    counts = done(cache.store.control.pin(pinned, 3600.0))
    assert counts == {"host": 3, "ssd": 3, "remote": 3}
    for number in range(3, 40):
        cache.put(tokens(number, 6))
    assert cache.held(pinned)["host"] == 3
    found = cache.store.match(pinned)
    assert found.places == ["host"] * 3
    found.drop()
    assert cache.held(plain)["host"] == 0
    assert done(cache.store.control.delete(pinned))["host"] == 3  # a pin does not protect from it
    cache.put(pinned)  # and it is as any other now
    assert cache.store.flush(PATIENCE_S)


def test_pins_end_and_take_half_of_a_tier_at_most(cache: Cache) -> None:
    host, now = cache.store.host, [0.0]
    host._pinned = TimedPins(host.policy, lambda: now[0])
    cache.put(tokens(1, 20))
    counts = done(cache.store.control.pin(tokens(1, 20), 60.0))
    assert counts["host"] == 12 and counts["ssd"] == 20
    for number in range(2, 12):
        cache.put(tokens(number, 6))
    assert cache.held(tokens(1, 12))["host"] == 12
    now[0] = 61.0
    for number in range(12, 40):
        cache.put(tokens(number, 6))
    assert not len(host._pinned)
    eventually(lambda: cache.held(tokens(1, 20))["host"] < 12)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e300, float("inf"), float("nan"), "x", None])
def test_a_time_that_is_none_is_refused(cache: Cache, seconds: Any) -> None:
    with pytest.raises(KVError, match="makes no sense"):
        cache.store.control.pin(tokens(1, 1), seconds)
