"""A put says what was kept, where, and why not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S, eventually
from shelf import Shelf

from quire.errors import KVError
from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.open import open_store
from quire.kv.policy import LearnedPolicy
from quire.kv.policy.refusals import ALL_HELD, SHARE_REACHED, WORTH_LESS
from quire.kv.puts import CANCELLED, FAILED, NO_SLOT, TURNED_AWAY
from quire.kv.store import KVStore
from quire.kv.tiers.host import NOTHING_KEPT, HostTier
from quire.kv.tiers.memory import HostMemory
from quire.kv.tiers.ssd.geometry import Geometry

BLOCK, IMAGE = 4, 4096
NAMESPACE = Namespace("model", "float32", "float32", BLOCK, "layout", "rope")
TOKENS = list(range(10 * BLOCK))
BLOCKS = list(range(10))


def make_store(*tiers: Shelf, capacity: int = 16, passing: int = 16) -> tuple[KVStore, ImagePool]:
    pool = ImagePool(torch.randint(0, 255, (32, IMAGE), dtype=torch.uint8))
    memory = HostMemory(IMAGE, capacity + passing, pinned=False)
    host = HostTier(memory, LearnedPolicy[bytes](capacity))
    return KVStore(pool, NAMESPACE, host, tiers), pool


def test_all_of_it_in_every_tier() -> None:
    store, _ = make_store(Shelf(IMAGE, "ssd"), Shelf(IMAGE, "remote", is_local=False))
    put = store.put(TOKENS, BLOCKS)
    assert put.wait_until_kept(PATIENCE_S) and put.num_kept == put.num_blocks == 10
    assert all(put.kept(tier) == [True] * 10 for tier in ("host", "ssd", "remote"))
    assert not put.refused
    again = store.put(TOKENS, BLOCKS)
    assert again.done() and again.kept("host") == [True] * 10
    store.close()


@pytest.mark.parametrize("name", ["ssd", "remote"])
def test_a_tier_gets_what_it_lacks_of_what_host_memory_has(name: str) -> None:
    """Out of host memory: the device is not copied once more."""
    shelf = Shelf(IMAGE, name, is_local=name == "ssd")
    store, pool = make_store(shelf)
    put, shelf.write = shelf.write, lambda names, images: [False] * len(names)  # type: ignore
    away = store.put(TOKENS, BLOCKS)
    assert away.wait_until_kept(PATIENCE_S) and away.kept(name) == [False] * 10
    still = store.put(TOKENS, BLOCKS)
    assert still.wait_until_kept(PATIENCE_S) and still.kept(name) == [False] * 10
    assert still.refused == {(name, TURNED_AWAY): 10} and still.kept("host") == [True] * 10
    shelf.write = put  # type: ignore[method-assign]
    wanted = [pool.images[block].numpy().tobytes() for block in BLOCKS]
    pool.images.zero_()
    back = store.put(TOKENS, BLOCKS)
    assert back.wait_until_kept(PATIENCE_S) and back.kept(name) == [True] * 10
    assert not back.refused and back.kept("host") == [True] * 10
    assert [shelf.images[each.key][1] for each in store.names(TOKENS)] == wanted
    assert store.host.counters.writes.blocks == 10
    assert not store.host._held
    store.close()


def test_a_far_tier_is_not_asked_for_what_it_was_given() -> None:
    shelf = Shelf(IMAGE, "remote", is_local=False)
    store, _ = make_store(shelf)
    assert store.put(TOKENS, BLOCKS).wait_until_kept(PATIENCE_S)
    shelf.asked.clear()
    for names in store.names(TOKENS), lambda: store.names(TOKENS):
        again = store.put_names(names, BLOCKS)
        assert again.wait_until_kept(PATIENCE_S) and again.kept("remote") == [True] * 10
    assert not shelf.asked.is_set()
    store.close()


def test_a_far_tier_is_asked_again_for_what_left_host_memory() -> None:
    shelf = Shelf(IMAGE, "remote", is_local=False)
    store, _ = make_store(shelf)
    assert store.put(TOKENS, BLOCKS).wait_until_kept(PATIENCE_S)
    store.host.clear()
    shelf.images.clear()
    again = store.put(TOKENS, BLOCKS)
    assert again.wait_until_kept(PATIENCE_S) and again.kept("remote") == [True] * 10
    assert len(shelf.images) == 10
    store.close()


def test_what_came_from_a_far_tier_is_not_given_back_to_it() -> None:
    shelf = Shelf(IMAGE, "remote", is_local=False)
    store, _ = make_store(shelf)
    assert store.put(TOKENS, BLOCKS).wait_until_kept(PATIENCE_S)
    store.host.clear()
    match = store.match(TOKENS)
    assert match.wait(PATIENCE_S) and match.load(BLOCKS).wait(PATIENCE_S)
    shelf.asked.clear()
    again = store.put(TOKENS, BLOCKS)
    assert again.done() and again.kept("remote") == [True] * 10 and not shelf.asked.is_set()
    store.close()


def test_what_is_cancelled_is_not_given_to_a_tier_that_lacks_it() -> None:
    shelf = Shelf(IMAGE, "ssd")
    store, _ = make_store(shelf)
    assert store.put(TOKENS, BLOCKS).wait_until_kept(PATIENCE_S)
    shelf.images.clear()
    may_go = threading.Event()
    store._putter._copies.submit(lambda: may_go.wait(PATIENCE_S))
    put = store.put(TOKENS, BLOCKS)
    put.cancel()
    may_go.set()
    assert put.wait_until_kept(PATIENCE_S) and put.kept("host") == [True] * 10
    assert put.refused == {("ssd", CANCELLED): 10} and not shelf.images
    store.close()


def test_what_host_memory_has_no_room_for() -> None:
    store, _ = make_store(Shelf(IMAGE, "ssd"), capacity=6)
    put = store.put(TOKENS, BLOCKS)
    assert put.wait_until_kept(PATIENCE_S)
    assert sum(put.kept("host")) == 6 and put.refused == {("host", WORTH_LESS): 4}
    assert put.kept("ssd") == [True] * 10 and put.num_kept == 10
    match = store.match(TOKENS)
    assert match.places == [
        "host" if held else "ssd" for held in put.kept("host")
    ]  # what it says is where they are found
    match.drop()
    store.close()


def test_host_memory_that_matches_hold() -> None:
    store, _ = make_store(capacity=10)
    assert store.put(TOKENS, BLOCKS).wait_until_kept(PATIENCE_S)
    match = store.match(TOKENS)
    others = store.put([token + 1000 for token in TOKENS], BLOCKS)
    assert others.wait_until_kept(PATIENCE_S) and others.refused == {("host", ALL_HELD): 10}
    match.drop()
    store.close()


def open_with(**settings) -> KVStore:
    images = torch.randint(0, 255, (32, IMAGE), dtype=torch.uint8)
    return open_store(ImagePool(images), NAMESPACE, **settings)


def refusals(store: KVStore, salt: str = "") -> dict[tuple[str, str], int]:
    """What the tiers say to a put."""
    put = store.put(TOKENS, BLOCKS, salt)
    assert put.wait_until_kept(PATIENCE_S)
    store.close()
    return dict(put.refused)


def test_a_tenant_that_has_its_share(tmp_path: Path) -> None:
    store = open_with(
        host_cache_bytes=16 * IMAGE,
        ssd_cache_dir=str(tmp_path / "kv"),
        ssd_cache_bytes=Geometry(IMAGE, BLOCK).quota_for(16),
        tenant_cache_share=0.5,
    )
    told = refusals(store, "acme")
    assert told == {("host", SHARE_REACHED): 2, ("ssd", SHARE_REACHED): 2}


def test_a_full_ssd(tmp_path: Path) -> None:
    quota = Geometry(IMAGE, BLOCK).quota_for(8)
    folder = str(tmp_path / "kv")
    store = open_with(host_cache_bytes="1MiB", ssd_cache_dir=folder, ssd_cache_bytes=quota)
    assert refusals(store) == {("ssd", WORTH_LESS): 2}


def test_an_archive_that_is_missing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/missing"
    [((tier, why), count)] = refusals(
        open_with(host_cache_bytes="1MiB", remote_cache_url=url)
    ).items()
    assert (tier, count) == ("remote", 10)
    assert why.startswith("the store is away") and "missing is no folder" in why


def test_an_archive_whose_quota_is_used_up(tmp_path: Path) -> None:
    url = f"file://{tmp_path}?quota=5000"
    told = refusals(open_with(host_cache_bytes="1MiB", remote_cache_url=url))
    assert told == {("remote", "the archive is over its quota until it is swept"): 10}


def test_a_shared_cache_whose_server_is_gone(tmp_path: Path) -> None:
    url = f"quire://{tmp_path}/socket"
    [(_, why)] = refusals(open_with(host_cache_bytes="1MiB", remote_cache_url=url))
    assert why.startswith("the store is away")


def test_an_archive_that_comes_back_gets_what_is_put_again(tmp_path: Path) -> None:
    """And another process finds it, which it did not while host memory had it first."""
    mount = tmp_path / "mount"
    url = f"file://{mount}"
    store = open_with(host_cache_bytes="1MiB", remote_cache_url=url)
    away = store.put(TOKENS, BLOCKS)
    assert away.wait_until_kept(PATIENCE_S) and not any(away.kept("remote"))
    mount.mkdir()
    eventually(lambda: store.stats()["remote"]["breaker"] == "closed")
    back = store.put(TOKENS, BLOCKS)
    assert back.wait_until_kept(PATIENCE_S) and back.kept("remote") == [True] * 10
    other = open_with(host_cache_bytes="1MiB", remote_cache_url=url)
    match = other.match(TOKENS)
    assert match.wait(PATIENCE_S) and match.places == ["remote"] * 10
    match.drop()
    other.close()
    store.close()


def test_nothing_where_no_tier_has_room() -> None:
    store, _ = make_store(capacity=0)
    put = store.put(TOKENS, BLOCKS)
    assert put.wait_until_kept(PATIENCE_S) and put.num_kept == 0
    assert put.refused == {("host", NOTHING_KEPT): 10}
    store.close()


def test_a_tier_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf(IMAGE, "ssd")

    def fail(names, images):
        raise OSError("the disk is gone")

    shelf.write = fail  # type: ignore[method-assign]
    store, _ = make_store(shelf)
    put = store.put(TOKENS, BLOCKS)
    assert put.wait_until_kept(PATIENCE_S) and put.kept("host") == [True] * 10
    assert put.kept("ssd") == [False] * 10
    assert sum(n for (tier, _), n in put.refused.items() if tier == "ssd") == 10
    store.close()


def test_names_are_made_by_the_thread_that_copies() -> None:
    store, _ = make_store()
    namers: list[int] = []

    def names():
        namers.append(threading.get_ident())
        return store.names(TOKENS)

    put = store.put_names(names, BLOCKS)
    assert put.wait_until_kept(PATIENCE_S) and put.kept("host") == [True] * 10
    assert len(namers) == 1 and namers[0] != threading.get_ident()
    again = store.put_names(names, BLOCKS)  # what is there is not copied once more
    assert again.wait_until_kept(PATIENCE_S) and again.kept("host") == [True] * 10
    assert store.host.counters.writes.blocks == 10
    store.close()


@pytest.mark.parametrize("piece", [16, 4])
def test_a_copy_that_fails(piece: int, caplog: pytest.LogCaptureFixture) -> None:
    store, pool = make_store()
    store._putter.piece = piece  # blocks; those behind the piece that fails are refused with it

    def fail(*args):
        raise RuntimeError("the device is gone")

    pool.to_host = fail  # type: ignore[method-assign]
    put = store.put(TOKENS, BLOCKS)
    assert put.wait_until_kept(PATIENCE_S)
    assert put.num_kept == 0 and put.refused == {("host", FAILED): 10}
    store.close()


def test_what_is_cancelled_before_it_began() -> None:
    store, _ = make_store()
    may_go = threading.Event()
    store._putter._copies.submit(lambda: may_go.wait(PATIENCE_S))
    put = store.put(TOKENS, BLOCKS)
    put.cancel()
    may_go.set()
    assert put.wait_until_kept(PATIENCE_S)
    assert put.num_kept == 0 and put.refused == {("host", CANCELLED): 10}
    store.close()


def test_what_comes_during_a_write_is_one_write() -> None:
    """And each put is told of its own blocks."""
    shelf = Shelf(IMAGE, "remote", is_local=False)
    store, _ = make_store(shelf, capacity=32)
    batches: list[int] = []
    begun, may_end, write = threading.Event(), threading.Event(), shelf.write

    def slow(names, images):
        batches.append(len(names))
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return [name.tokens != odd for name, *_ in zip(names, write(names, images), strict=True)]

    shelf.write = slow  # type: ignore[method-assign]
    prompts = [[1000 * number + at for at in range(2 * BLOCK)] for number in range(5)]
    odd = store.names(prompts[3])[1].tokens  # the tier refuses this one
    puts = [store.put(prompts[0], [0, 1])]
    assert begun.wait(PATIENCE_S)
    puts += [store.put(prompts[at], [2 * at, 2 * at + 1]) for at in range(1, 5)]
    assert all(put.wait(PATIENCE_S) for put in puts)
    puts[4].writes[0].cancel()
    may_end.set()
    assert all(put.wait_until_kept(PATIENCE_S) for put in puts)
    assert batches == [2, 6]
    kept = [put.kept("remote") for put in puts]
    assert kept == [[True, True]] * 3 + [[True, False], [False, False]]
    assert puts[3].refused == {("remote", TURNED_AWAY): 1}
    assert puts[4].refused == {("remote", CANCELLED): 2}
    store.close()


def test_no_slot_while_all_wait_for_a_slow_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kv.puts.SLOT_WAIT_S", 0.01)
    store, _ = make_store(capacity=0, passing=4)
    slots = store.host.take(4)
    put = store.put(TOKENS, BLOCKS)
    assert put.wait_until_kept(PATIENCE_S)
    assert put.num_kept == 0 and put.refused == {("host", NO_SLOT): 10}
    store.host.release(slots)
    store.close()


def test_a_tier_that_the_store_has_not() -> None:
    store, _ = make_store(Shelf(IMAGE, "ssd"))
    put = store.put(TOKENS, BLOCKS)
    with pytest.raises(KVError, match="This store has host, ssd, and no tier 'nope'"):
        put.kept("nope")
    store.close()
