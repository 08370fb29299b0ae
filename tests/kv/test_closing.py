"""A closed store refuses calls and leaves nobody waiting; forks leave it to its process."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from patience import PATIENCE_S, eventually
from shelf import Shelf

from quire.errors import KVError
from quire.kv import ImagePool, KVStore, Namespace, open_stores
from quire.kv.policy import LRUPolicy
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory

IMAGE = 5000
NAMESPACE = Namespace("model", "float32", "float32", 4, "layout", "rope")
TOKENS, OTHER = list(range(40)), list(range(100, 140))  # ten blocks each
BLOCKS = list(range(10))
AT_ONCE_S = 10.0  # much less than what these calls would wait, and did


def make_store(*tiers: Shelf) -> KVStore:
    pool = ImagePool(torch.zeros(32, IMAGE, dtype=torch.uint8))
    host = HostTier(HostMemory(IMAGE, 48, pinned=False), LRUPolicy(32))
    return KVStore(pool, NAMESPACE, host, tiers)


def test_a_with_statement_writes_what_was_put_and_closes_the_store():
    shelf = Shelf(IMAGE)
    with make_store(shelf) as store:
        store.put(TOKENS, BLOCKS)
    assert len(shelf.images) == 10
    with pytest.raises(KVError, match="closed"):
        store.put(TOKENS, BLOCKS)


REFUSED = {
    "put": lambda store, match: store.put(OTHER, BLOCKS),
    "put of what is held": lambda store, match: store.put(TOKENS, BLOCKS),
    "put_names": lambda store, match: store.put_names(store.names(OTHER), BLOCKS),
    "put_tables": lambda store, match: store.put_tables(OTHER, [BLOCKS]),
    "match": lambda store, match: store.match(TOKENS),
    "match_names": lambda store, match: store.match_names(store.names(TOKENS)),
    "match_tables": lambda store, match: store.match_tables(TOKENS),
    "load": lambda store, match: match.load(BLOCKS),
    "load_by_layer": lambda store, match: store.load_by_layer(match, BLOCKS),
    "prefetch": lambda store, match: store.prefetch(store.names(TOKENS)),
    "fetch": lambda store, match: store.fetch(store.names(TOKENS), ["ssd"] * 10),
    "use": lambda store, match: store.use([b"key"]),
    "flush": lambda store, match: store.flush(PATIENCE_S),
    "held": lambda store, match: store.control.held(),
    "pin": lambda store, match: store.control.pin(TOKENS, 60),
    "delete": lambda store, match: store.control.delete(TOKENS),
    "delete_tenant": lambda store, match: store.control.delete_tenant("tenant"),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_calls_after_the_close_say_that_it_is_closed(call):
    store = make_store(Shelf(IMAGE))
    assert store.put(TOKENS, BLOCKS).wait(PATIENCE_S)
    match = store.match(TOKENS)
    store.close()
    with pytest.raises(KVError, match=r"closed; open another with open_store\.$"):
        call(store, match)
    store.close()


def test_what_gives_something_back_still_may_after_the_close():
    store = make_store(Shelf(IMAGE))
    assert store.put(TOKENS, BLOCKS).wait(PATIENCE_S)
    matches = store.match(TOKENS), store.match(TOKENS)
    load = matches[0].load(BLOCKS)
    store.close()
    started = time.monotonic()
    assert load.wait(PATIENCE_S)
    assert store.withdraw(load).wait(PATIENCE_S)
    assert store.leave_device(PATIENCE_S)
    matches[1].drop()
    store.close()
    assert time.monotonic() - started < AT_ONCE_S
    assert not store.host._held and store.stats()["host"]["used"] == 10


def test_handles_that_are_open_at_the_close_end(caplog):
    threads_before = set(threading.enumerate())
    shelf = Shelf(IMAGE)
    store = make_store(shelf)
    assert store.put(TOKENS, BLOCKS).wait_until_kept(PATIENCE_S)
    store.host.clear()
    match = store.match(TOKENS)
    shelf.gate.clear()
    shelf.asked.clear()
    load, begun = match.load(BLOCKS), store.put(OTHER, BLOCKS)
    assert begun.wait(PATIENCE_S) and shelf.asked.wait(PATIENCE_S)
    put = store.put(OTHER[4:], BLOCKS)
    assert put.wait(PATIENCE_S) and shelf.reading.wait(PATIENCE_S)
    listing, pinned = store.control.held(), store.control.pin(TOKENS, 60)
    store.close(timeout=0.1)
    assert load.wait(0) and load.num_loaded == 0 and not any(load.arrived)
    assert begun.wait_until_kept(0) and put.wait_until_kept(0) and not any(put.kept("ssd"))
    assert listing.wait(0) and pinned.wait(0)
    assert ["under way" in record.message for record in caplog.records] == [True]
    shelf.gate.set()
    eventually(lambda: not set(threading.enumerate()) - threads_before)
    assert not shelf.images.keys() & {name.key for name in store.names(OTHER[4:])}


@pytest.mark.parametrize("trial", range(8))
def test_threads_that_put_while_another_closes_do_not_hang(trial):
    store = make_store(Shelf(IMAGE))
    handles, started = [], threading.Barrier(4)

    def work(number: int) -> None:
        started.wait()
        for at in range(1000):
            tokens = [number, at] * 20
            try:
                handles.append(store.put(tokens, BLOCKS))
                handles.append(store.match(tokens).load(BLOCKS))
                handles.append(store.control.held())
            except KVError:
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.002 * trial)
    store.close(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(handle.wait(AT_ONCE_S) for handle in handles)


def test_a_store_is_kept_alive_by_what_is_under_way_and_by_nothing_else():
    """So the end of a process finds what it has to wait for, whoever has let go of the store."""
    shelf = Shelf(IMAGE)
    store = make_store(shelf)
    shelf.gate.clear()
    assert store.put(TOKENS, BLOCKS).wait(PATIENCE_S)
    dropped = weakref.ref(store)
    del store
    gc.collect()
    assert dropped() in open_stores._stores
    shelf.gate.set()

    def is_gone() -> bool:
        gc.collect()
        return dropped() is None

    eventually(is_gone)
    assert len(shelf.images) == 10


def test_a_closed_store_is_forgotten():
    store = make_store()
    assert store in open_stores._stores
    store.close()
    assert store not in open_stores._stores
