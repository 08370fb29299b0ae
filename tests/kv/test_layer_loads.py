"""Loads that come layer by layer: each layer can be used as soon as its own part is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random

import pytest
import torch
from patience import PATIENCE_S
from pool_layouts import LaidOut, Shape, lay_out

from quire.errors import KVError
from quire.kv import KVStore, LayerPool, Namespace, open_store
from quire.kv.pools.block_pool import Transfer
from quire.kv.tiers.ssd.geometry import DATA_FILE

SHAPE = Shape(num_layers=3)
NAMESPACE = Namespace("model", "", "", SHAPE.block_size, "layout", "rope")
TOKENS = list(range(4 * SHAPE.block_size))
PUT, LOADED = [0, 1, 2, 3], [7, 4, 6, 5]


class GatedPool(LayerPool):
    """Each layer waits until it is let through."""

    def __init__(self, layers) -> None:
        super().__init__(layers)
        self.gates = [threading.Semaphore(0) for _ in layers]

    def from_host_by_layer(self, *args, **kwargs) -> Iterator[Transfer]:
        layers = super().from_host_by_layer(*args, **kwargs)
        for gate in self.gates:
            assert gate.acquire(timeout=PATIENCE_S)
            yield next(layers)


@pytest.fixture
def pool() -> LaidOut:
    layers = lay_out("layers", SHAPE, 8, Random(0)).streams
    return LaidOut(GatedPool(layers), layers, list(range(8)))


@pytest.fixture
def store(pool: LaidOut, tmp_path) -> Iterator[KVStore]:
    store = open_store(
        pool.pool,
        NAMESPACE,
        host_cache_bytes="1MiB",
        ssd_cache_dir=str(tmp_path),
        ssd_cache_bytes="8MiB",
    )
    assert store.put(TOKENS, PUT).wait_until_kept(PATIENCE_S)
    yield store
    assert store.flush(PATIENCE_S)
    assert not store.host.stats()["held"]
    store.close()


def layer_values(pool: LaidOut, layer: int, blocks: list[int]) -> torch.Tensor:
    return LaidOut(pool.pool, [pool.streams[layer]], pool.rows).values(blocks)


def only_on_disk(store: KVStore, places: range) -> None:
    """Leave the other blocks in host memory."""
    assert store.host.clear() == 4
    names = store.names(TOKENS)
    others = [at for at in range(4) if at not in places]
    put = store.put_names([names[at] for at in others], [PUT[at] for at in others])
    assert put.wait_until_kept(PATIENCE_S)


def test_a_layer_is_there_before_the_next(pool: LaidOut, store: KVStore) -> None:
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    for layer, gate in enumerate(pool.pool.gates):
        assert not load.wait_for_layer(layer, timeout=0.01)
        gate.release()
        assert load.wait_for_layer(layer, PATIENCE_S)
        assert load.num_coming == 4
        assert torch.equal(layer_values(pool, layer, LOADED), layer_values(pool, layer, PUT))
    assert load.wait(PATIENCE_S) and load.num_loaded == 4


@pytest.mark.parametrize("layer", [-1, 3, "first", None])
def test_a_layer_that_is_none(pool: LaidOut, store: KVStore, layer) -> None:
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    with pytest.raises(KVError, match="counted from 0, and the pool has 3"):
        load.wait_for_layer(layer, PATIENCE_S)
    for gate in pool.pool.gates:
        gate.release()
    assert load.wait(PATIENCE_S)


def test_a_pool_of_images_knows_no_number_of_layers() -> None:
    pool = lay_out("images", SHAPE, 8, Random(0))
    store = open_store(pool.pool, NAMESPACE, host_cache_bytes="1MiB")
    assert store.put(TOKENS, PUT).wait(PATIENCE_S)
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    assert all(load.wait_for_layer(layer, PATIENCE_S) for layer in range(3))
    with pytest.raises(KVError, match=r"There is no layer -1: they are counted from 0\."):
        load.wait_for_layer(-1, PATIENCE_S)
    store.close()


@pytest.mark.parametrize("places", [range(2), range(1, 3), range(4)], ids=str)
def test_slower_tiers_come_first(pool: LaidOut, store: KVStore, places: range) -> None:
    only_on_disk(store, places)
    for gate in pool.pool.gates:
        gate.release()
    match = store.match(TOKENS)
    assert [place == "ssd" for place in match.places] == [at in places for at in range(4)]
    load = store.load_by_layer(match, LOADED)
    for layer in range(3):
        assert load.wait_for_layer(layer, PATIENCE_S) and load.num_coming == 4
        assert torch.equal(layer_values(pool, layer, LOADED), layer_values(pool, layer, PUT))
    assert load.wait(PATIENCE_S) and load.num_loaded == 4


def test_what_a_disk_lost_is_known_before_the_first_layer(
    pool: LaidOut, store: KVStore, tmp_path
) -> None:
    only_on_disk(store, range(2, 4))
    for file in tmp_path.rglob(DATA_FILE):
        with open(file, "r+b") as data:
            data.write(bytes(file.stat().st_size))
    for gate in pool.pool.gates:
        gate.release()
    before = pool.values(LOADED[2:])
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    assert load.wait_for_layer(0, PATIENCE_S) and load.num_coming == 2
    assert load.wait(PATIENCE_S) and load.num_loaded == 2
    assert torch.equal(pool.values(LOADED[:2]), pool.values(PUT[:2]))
    assert torch.equal(pool.values(LOADED[2:]), before)


def test_one_that_is_cancelled_ends(pool: LaidOut, store: KVStore) -> None:
    only_on_disk(store, range(1))
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    assert store.withdraw(load).wait(PATIENCE_S)
    for gate in pool.pool.gates:
        gate.release()
    assert load.wait(PATIENCE_S)


def test_a_copy_that_fails_is_a_miss(
    pool: LaidOut, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> Iterator[Transfer]:
        yield Transfer()
        raise RuntimeError("no such layer")

    monkeypatch.setattr(pool.pool, "from_host_by_layer", fail)
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    assert load.wait_for_layer(0, PATIENCE_S)
    assert not load.wait_for_layer(1, PATIENCE_S)
    assert load.done() and load.num_loaded == 0


def test_a_copy_that_fails_holds_its_slots_until_those_before_are_over(
    pool: LaidOut, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    class Copy(Transfer):
        def wait(self) -> None:
            held.append(store.host.stats()["held"])

    def fail(*args: object, **kwargs: object) -> Iterator[Transfer]:
        yield Copy()
        raise RuntimeError("no such layer")

    monkeypatch.setattr(pool.pool, "from_host_by_layer", fail)
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    assert load.wait(PATIENCE_S) and held == [4]


def test_a_pool_that_knows_no_layers(tmp_path) -> None:
    made = lay_out("images", SHAPE, 8, Random(0))
    store = open_store(made.pool, NAMESPACE, host_cache_bytes="1MiB")
    assert store.put(TOKENS, PUT).wait(PATIENCE_S)
    load = store.load_by_layer(store.match(TOKENS), LOADED)
    assert load.wait_for_layer(2, PATIENCE_S) and load.num_coming == 4
    assert torch.equal(made.values(LOADED), made.values(PUT))
    store.close()
