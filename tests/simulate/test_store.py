"""The tiers' clock: pipes queue, and what a copy brings is there when it is over, not before."""

from __future__ import annotations

import pytest

from quire.kv.block_log import BlockLog, Place
from quire.kv.keys import Namespace
from quire.kv.policy import LRUPolicy
from quire.kv.puts import MOST_WAITING, PIECE_BYTES
from quire.simulate.clock import Clock
from quire.simulate.store import TimedStore
from quire.simulate.tiers import Pipe, PolicyTier, RemoteTier, SharedStore

BLOCK = 1 << 20
RATE = float(BLOCK)  # a block a second
NAMESPACE = Namespace("test", "", "", 4, "", "")


def make_store(host=8, ssd=0, shared=None, block_bytes=BLOCK):
    below = [PolicyTier(Place.SSD, LRUPolicy(ssd), RATE, RATE)] if ssd else []
    if shared is not None:
        below.append(RemoteTier(shared, RATE, RATE))
    tier = PolicyTier(Place.HOST, LRUPolicy(host), 10 * RATE, 10 * RATE)
    return TimedStore(Clock(), NAMESPACE, block_bytes, tier, below, remote_latency=0.25)


def names(store, first, num):
    from quire.kv.keys import block_names, tenant_tag

    root = store.root("")
    tokens = [bytes([first + i]) * 16 for i in range(num)]
    return block_names(root, root, tokens, tenant_tag(""))


def test_what_goes_through_a_pipe_queues():
    pipe = Pipe(100.0)
    assert [pipe.send(200, 0.0), pipe.send(100, 1.0), pipe.send(100, 10.0)] == [2.0, 3.0, 11.0]
    assert pipe.waiting(10.5) == 50 and pipe.waiting(20.0) == 0


def test_a_put_is_found_when_it_has_arrived():
    store = make_store()
    wanted = names(store, 0, 4)
    put = store.put_names(wanted, [0, 1, 2, 3])
    assert not put.done() and len(store.match_names(wanted)) == 0
    store.clock.now = 0.4
    assert put.done() and store.match_names(wanted).places == ["host"] * 4


def test_loads_take_their_time_one_behind_the_other():
    store = make_store(host=2, ssd=20)
    wanted = names(store, 0, 4)
    store.put_names(wanted, range(4))
    store.clock.now = 100.0
    matches = [store.match_names(wanted) for _ in range(2)]
    assert matches[0].places == ["host", "host", "ssd", "ssd"]
    loads = [match.load(range(4)) for match in matches]
    assert loads[0].num_loaded == 4
    ends = [load.end_at - 100.0 for load in loads]
    assert ends[0] == pytest.approx(2 + 0.2)  # two blocks from the disk, behind them two copies
    assert ends[1] > ends[0] + 1.9
    store.handles.wait_for_any(60.0)
    assert store.clock.now == loads[0].end_at and loads[0].done() and not loads[1].done()


def test_a_disk_that_cannot_follow_is_not_waited_for():
    store = make_store(host=1000, ssd=1000, block_bytes=PIECE_BYTES)
    for first in range(0, 2 * MOST_WAITING, 4):
        store.put_names(names(store, first, 4), range(4))
        store.clock.now += 13.0  # time enough for host memory, and for a tenth of it on disk
    store.use([])
    written = store._below["ssd"].writes.num_bytes
    assert MOST_WAITING * PIECE_BYTES < written < 1.5 * MOST_WAITING * PIECE_BYTES


def test_a_far_store_answers_after_a_while_and_is_everyones():
    shared = SharedStore(100)
    one, other = make_store(shared=shared), make_store(shared=shared)
    wanted = names(one, 0, 3)
    one.put_names(wanted, range(3))
    one.clock.now = 0.3  # in host memory, and three seconds on the line
    one.use([])
    one.clock.now = other.clock.now = 10.0
    one.use([])
    match = other.match_names(wanted)
    assert not match.ready()
    other.clock.now += 0.25
    assert match.ready() and match.places == ["remote"] * 3


def test_the_shared_store_forgets_what_was_not_used_for_longest():
    shared = SharedStore(3)
    store = make_store(shared=shared)
    old = names(store, 0, 3)
    shared.keep(old)
    shared.use([old[0].key])
    shared.keep(names(store, 50, 1))
    assert len(shared) == 3 and old[0].key in shared and old[1].key not in shared


def test_prefetched_blocks_come_nearer():
    store = make_store(host=4, ssd=20)
    wanted, others = names(store, 0, 3), names(store, 50, 4)
    store.put_names(wanted, range(3))
    store.clock.now = 50.0
    store.put_names(others, range(4))
    store.clock.now = 100.0
    assert set(store.match_names(wanted).places) == {"ssd"}
    store.prefetch(wanted)
    store.clock.now = 110.0
    assert set(store.match_names(wanted).places) == {"host"}


def test_blocks_are_told_of_as_they_come_and_go():
    store, log = make_store(host=2), BlockLog()
    store.publish_events(log)
    wanted = names(store, 0, 2)
    store.put_names(wanted, range(2))
    store.clock.now = 1.0
    store.use([])
    assert set(log.take().stored) == {name.key[:16] for name in wanted}
    store.put_names(names(store, 50, 2), range(2))
    store.clock.now = 2.0
    store.use([])
    assert set(log.take().removed) == {name.key[:16] for name in wanted}
