"""The store: images go down the tiers and come back, whole or not at all, and nothing waits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from patience import PATIENCE_S, eventually
from shelf import Shelf

from quire.errors import KVError
from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.policy import LRUPolicy
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory

BLOCK = 4
IMAGE = 5000  # no whole number of pages
NAMESPACE = Namespace("model", "float32", "float32", BLOCK, "layout", "rope")


def make_store(*tiers, capacity=16, passing=8, blocks=32):
    torch.manual_seed(0)
    pool = ImagePool(torch.randint(0, 255, (blocks, IMAGE), dtype=torch.uint8))
    memory = HostMemory(IMAGE, capacity + passing, pinned=False)
    return KVStore(pool, NAMESPACE, HostTier(memory, LRUPolicy(capacity)), tiers), pool


def check_idle(store):
    assert store.flush(PATIENCE_S)
    host = store.host
    assert not host._held
    assert len(host) + len(host._free) == host.memory.num_slots
    assert len(host) <= host.capacity


TOKENS = np.arange(40, dtype=np.int32)  # ten blocks


@pytest.fixture(params=["host", "ssd", "remote"])
def place(request):
    return request.param


def filled(place, **settings):
    """A store with ten blocks that only `place` holds, their images, and its pool."""
    tiers = [] if place == "host" else [Shelf(IMAGE, place, is_local=place == "ssd")]
    store, pool = make_store(*tiers, **settings)
    wanted = pool.images[:10].clone()
    assert store.put(TOKENS, list(range(10))).wait(PATIENCE_S)
    assert store.flush(PATIENCE_S)
    if place != "host":
        store.host.clear()
    pool.images.zero_()
    return store, pool, wanted


def ready(match):
    eventually(match.ready)
    return match


def test_what_was_put_comes_back_from_every_tier(place):
    store, pool, wanted = filled(place)
    match = ready(store.match(np.append(TOKENS, [1, 2, 3])))
    assert match.places == [place] * 10
    load = match.load(list(range(31, 21, -1)))
    assert load.wait(PATIENCE_S) and load.num_loaded == 10
    assert torch.equal(pool.images[range(31, 21, -1)], wanted)
    assert ready(store.match(TOKENS)).places == ["host"] * 10  # kept on the way
    store.close()


def test_only_the_same_tokens_behind_the_same_prefix_and_salt_match(place):
    store, _, _ = filled(place)
    other = TOKENS.copy()
    other[14] += 1
    assert len(ready(store.match(other))) == 3
    assert len(ready(store.match(TOKENS[4:]))) == 0
    assert len(ready(store.match(TOKENS, salt="tenant"))) == 0
    assert len(ready(store.match(TOKENS[:3]))) == 0
    store.close()


def test_a_hit_that_vanishes_is_a_miss_and_so_is_all_behind_it():
    store, pool, wanted = filled("ssd")
    match = store.match(TOKENS)
    names = list(store.tiers[0].images)
    del store.tiers[0].images[names[6]]
    load = match.load(list(range(10)))
    assert load.wait(PATIENCE_S) and load.num_loaded == 6
    assert torch.equal(pool.images[: load.num_loaded], wanted[: load.num_loaded])
    check_idle(store)


@pytest.mark.parametrize("lost", [0, 1, 4, 9])
def test_all_that_is_in_front_of_a_miss_is_loaded(lost):
    """Also where one read brings what is in front of it, the miss, and what is behind it."""
    store, pool, wanted = filled("ssd")
    match, copy = store.match(TOKENS), pool.from_host
    copied = []

    def copy_later(images, slots, blocks, after, group):
        time.sleep(0.02)  # until the miss is known
        copied.extend(blocks)
        return copy(images, slots, blocks, after, group)

    pool.from_host = copy_later
    del store.tiers[0].images[match.names[lost].key]
    load = match.load(list(range(20, 30)))
    assert load.wait(PATIENCE_S) and load.num_loaded == lost
    assert copied == list(range(20, 20 + lost))
    assert torch.equal(pool.images[20 : 20 + lost], wanted[:lost])
    check_idle(store)


def test_a_tier_with_a_bug_is_a_miss():
    store, _, _ = filled("ssd")
    match = store.match(TOKENS)
    store.tiers[0].broken = True
    load = match.load(list(range(10)))
    assert load.wait(PATIENCE_S) and load.num_loaded == 0
    check_idle(store)


def test_a_copy_that_fails_is_a_miss_and_lets_its_slots_go(place, monkeypatch):
    store, pool, _ = filled(place)

    def fail(*args):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(pool, "from_host", fail)
    load = store.match(TOKENS).load(list(range(10, 20)))
    assert load.wait(PATIENCE_S) and load.num_loaded == 0
    check_idle(store)
    store.close()


def test_a_load_is_not_over_before_what_was_read_has_arrived():
    """A tier breaks while blocks that it gave before are still on their way to the device."""
    store, pool, wanted = filled("ssd", capacity=0, passing=8)
    shelf, read, copy = store.tiers[0], store.tiers[0].read, pool.from_host
    copying, may_copy = threading.Event(), threading.Event()

    def break_the_second_time(names, images):
        there = read(names, images)
        shelf.broken = True
        return there

    def copy_when_told(*args):
        copying.set()
        assert may_copy.wait(PATIENCE_S)
        return copy(*args)

    shelf.read, pool.from_host = break_the_second_time, copy_when_told
    others = store.host.take(6)  # two slots are left
    load = store.match(TOKENS).load(list(range(10)))
    assert copying.wait(PATIENCE_S)
    store.host.release(others)
    assert not load.wait(0.2)
    may_copy.set()
    assert load.wait(PATIENCE_S) and load.num_loaded == 2
    assert torch.equal(pool.images[:2], wanted[:2])
    check_idle(store)


def test_what_a_plan_holds_is_not_evicted():
    store, pool, wanted = filled("host", capacity=10, passing=2)
    match = store.match(TOKENS)
    for i in range(5):  # others want the room
        store.put(TOKENS + 100 * (i + 1), list(range(10, 20))).wait(PATIENCE_S)
    load = match.load(list(range(10)))
    assert load.wait(PATIENCE_S) and load.num_loaded == 10
    assert torch.equal(pool.images[:10], wanted)
    check_idle(store)


def test_a_plan_is_loaded_or_dropped_once(place):
    store, _, _ = filled(place)
    match = ready(store.match(TOKENS))
    match.drop()
    for again in (match.drop, lambda: match.load([0])):
        with pytest.raises(KVError, match="once"):
            again()
    check_idle(store)


def test_part_of_a_plan():
    store, pool, wanted = filled("host")
    load = store.match(TOKENS).load([20, 21, 22])
    assert load.wait(PATIENCE_S) and load.num_loaded == 3
    assert torch.equal(pool.images[20:23], wanted[:3])
    check_idle(store)


def test_a_cancelled_load_ends_when_nothing_touches_its_blocks():
    store, _, _ = filled("ssd")
    shelf = store.tiers[0]
    match = store.match(TOKENS)
    shelf.gate.clear()
    load = match.load(list(range(10)))
    assert shelf.reading.wait(PATIENCE_S)
    load.cancel()
    assert not load.wait(0.05)  # the read is under way
    shelf.gate.set()
    assert load.wait(PATIENCE_S) and load.num_loaded == 0
    check_idle(store)


def test_a_far_tier_that_does_not_answer_in_time_has_nothing(monkeypatch):
    monkeypatch.setattr("quire.kv.store.ASK_DEADLINE_S", 0.05)
    store, _, _ = filled("remote")
    store.tiers[0].gate.clear()
    match = store.match(TOKENS)
    eventually(match.ready)
    assert len(match) == 0
    store.tiers[0].gate.set()
    match.drop()


def test_without_room_to_keep_anything_images_still_pass():
    shelf = Shelf(IMAGE)
    store, pool = make_store(shelf, capacity=0, passing=4)
    wanted = pool.images.clone()
    for first in range(0, 10, 2):
        store.put(TOKENS[: 4 * (first + 2)], list(range(first + 2))).wait(PATIENCE_S)
        store.flush(PATIENCE_S)
    assert len(store.host) == 0 and len(shelf.images) >= 4
    match = store.match(TOKENS)
    count = len(match)
    load = match.load(list(range(31, 31 - count, -1)))
    assert load.wait(PATIENCE_S) and load.num_loaded == count
    assert torch.equal(pool.images[list(range(31, 31 - count, -1))], wanted[:count])
    check_idle(store)


def test_prefetched_blocks_wait_in_host_memory():
    store, _, _ = filled("ssd")
    store.prefetch(store.names(TOKENS))
    eventually(lambda: len(store.host) >= 10)
    assert store.match(TOKENS).places == ["host"] * 10


def test_many_at_once_with_a_host_tier_that_is_always_full():
    shelf = Shelf(IMAGE)
    store, pool = make_store(shelf, capacity=4, passing=4, blocks=64)
    contents = {}
    random = np.random.default_rng(0)
    for round in range(60):
        family = int(random.integers(8))
        tokens = TOKENS[: 4 * 6] + 1000 * family
        if family not in contents:
            blocks = list(range(6))
            pool.images[:6] = torch.randint(0, 255, (6, IMAGE), dtype=torch.uint8)
            contents[family] = pool.images[:6].clone()
            assert store.put(tokens, blocks).wait(PATIENCE_S)
        match = store.match(tokens)
        blocks = list(range(8 + 6 * (round % 9), 8 + 6 * (round % 9) + len(match)))
        if random.random() < 0.2:
            match.drop()
            continue
        load = match.load(blocks)
        if random.random() < 0.2:
            load.cancel()
        assert load.wait(PATIENCE_S)
        loaded = load.num_loaded
        assert torch.equal(pool.images[blocks[:loaded]], contents[family][:loaded])
    check_idle(store)
    store.close()


@pytest.mark.parametrize("near", [(), ("ssd",)])
def test_a_walk_over_far_blocks_looks_at_each_a_few_times(monkeypatch, near):
    """Not at all that are left, for each: the scheduler waits for the walk."""
    count = 200
    tiers = [Shelf(IMAGE, name, is_local=True) for name in near]
    far = Shelf(IMAGE, "remote", is_local=False)
    store, _ = make_store(far, blocks=count)
    tokens = np.arange(count * BLOCK, dtype=np.int32)
    assert store.put(tokens, range(count)).wait_until_kept(PATIENCE_S)
    store, _ = make_store(*tiers, far, blocks=count)
    looked_at = 0

    def counted(contains):
        def contains_counted(tier, keys):
            nonlocal looked_at
            looked_at += len(keys)
            return contains(tier, keys)

        return contains_counted

    for kind in (HostTier, Shelf):
        monkeypatch.setattr(kind, "contains", counted(kind.contains))
    match = ready(store.match(tokens))
    assert match.places == ["remote"] * count
    assert looked_at <= 5 * count
    match.drop()


def test_blocks_that_lie_in_turns_near_and_far_are_found():
    near, far = Shelf(IMAGE, "ssd", is_local=True), Shelf(IMAGE, "remote", is_local=False)
    store, _ = make_store(near, far)
    names = store.names(TOKENS)
    images = [memoryview(bytearray(IMAGE)) for _ in names]
    is_near = [1, 1, 0, 0, 0, 1, 0, 1, 1, 0]
    for at, tier in enumerate(near if here else far for here in is_near):
        tier.write(names[at : at + 1], images[at : at + 1])
    assert ready(store.match(TOKENS)).places == ["ssd" if here else "remote" for here in is_near]
