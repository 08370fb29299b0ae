"""The store as a library, for an engine whose model has several KV groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from patience import PATIENCE_S, eventually
from plain_hits import plain_hit
from redis_server import RedisServer

from quire.errors import KVError
from quire.kv import ImagePool, Namespace, open_store
from quire.kv.tiers.ssd.inspector import stat, verify

BLOCK = 4
SIZES = (9000, 5000, 9000)  # of images, no whole number of pages
WINDOWS = (None, 6, 10)
NAMESPACE = Namespace("model", "float32", "float32", BLOCK, "layout", "rope")
TOKENS = np.arange(40, dtype=np.int32)  # ten blocks
TABLES = [list(range(10)), [20, 21], [30, 31, 32]]  # of windows, what the next token looks into
POISON = 7


def open_all(place, folder, server=None):
    torch.manual_seed(0)
    pool = ImagePool(torch.randint(8, 255, (64, max(SIZES)), dtype=torch.uint8), SIZES)
    settings = {
        "host": {"host_cache_bytes": 1 << 20},
        "ssd": {"ssd_cache_dir": str(folder / "cache"), "ssd_cache_bytes": 1 << 20},
        "remote": {"remote_cache_url": f"unix://{server.socket}" if server else ""},
    }
    return open_store(pool, NAMESPACE, windows=WINDOWS, **settings[place]), pool


@pytest.fixture(params=["host", "ssd", "remote"])
def place(request):
    return request.param


@pytest.fixture
def opened(place, tmp_path):
    server = RedisServer(tmp_path) if place == "remote" else None
    store, pool = open_all(place, tmp_path, server)
    if server is not None:
        eventually(lambda: store.stats()["remote"]["breaker"] == "closed", "it is not connected")
    yield store, pool
    store.close()
    if server is not None:
        server.kill()


def found(store, tokens):
    match = store.match_tables(tokens)
    eventually(match.ready, "no answer")
    return match


def put(store, pool):
    """What the blocks held, which is in the tiers now and in the pool no more."""
    wanted = pool.images.clone()
    assert store.put_tables(TOKENS, TABLES).wait(PATIENCE_S) and store.flush(PATIENCE_S)
    pool.images.fill_(POISON)
    return wanted


def test_what_was_put_comes_back_from_every_tier(opened, place):
    store, pool = opened
    wanted = put(store, pool)
    match = found(store, np.append(TOKENS, [1, 2, 3]))
    assert len(match) == 10 and [match.first_needed(group) for group in range(3)] == [0, 8, 7]
    assert {image.found.place for image in match.images} == {place}
    tables = [list(range(40, 50)), [50, 51], [52, 53, 54]]
    load = match.load_tables(tables)
    assert load.wait(PATIENCE_S) and load.is_whole
    for group, size in enumerate(SIZES):
        for source, target in zip(TABLES[group], tables[group], strict=True):
            assert torch.equal(pool.images[target, :size], wanted[source, :size])
            assert (pool.images[target, size:] == POISON).all(), "padding was moved"
    moved = 10 * SIZES[0] + 2 * SIZES[1] + 3 * SIZES[2]
    assert store.stats()[place]["reads"]["bytes"] == moved
    assert store.stats()[place]["writes"]["bytes"] == moved


@pytest.mark.parametrize("lengths", [(10, 10, 10), (10, 2, 10), (10, 10, 3), (10, 2, 3)], ids=str)
def test_tables_of_the_whole_hit_or_of_what_it_needs(opened, lengths):
    """Either ends where the hit ends; what a window does not need is not touched."""
    store, pool = opened
    wanted = put(store, pool)
    ends = (42, 52, 62)
    tables = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    load = found(store, TOKENS).load_tables(tables)
    assert load.wait(PATIENCE_S) and load.is_whole
    assert load.num_loaded == sum(map(len, TABLES)), "images of all groups are counted"
    loaded = set()
    for group, (end, size) in enumerate(zip(ends, SIZES, strict=True)):
        targets = range(end - len(TABLES[group]), end)
        for source, target in zip(TABLES[group], targets, strict=True):
            assert torch.equal(pool.images[target, :size], wanted[source, :size])
            loaded.add(target)
    others = [block for block in range(64) if block not in loaded]
    assert (pool.images[others] == POISON).all()


@pytest.mark.parametrize(
    "lengths",
    [(10, 1, 3), (10, 3, 3), (10, 11, 3), (9, 2, 3), (10, 0, 0), (10, 2), (10, 2, 3, 3), ()],
    ids=str,
)
def test_tables_that_cannot_take_the_hit(tmp_path, lengths):
    store, pool = open_all("host", tmp_path)
    put(store, pool)
    with pytest.raises(KVError, match="3 KV groups, with 10 ids or the last 10, 2, 3"):
        found(store, TOKENS).load_tables([range(length) for length in lengths])
    assert (pool.images == POISON).all()
    assert not store.host.stats()["held"], "the match is used up"
    store.close()


@pytest.mark.parametrize("tables", [None, 5, [None] * 3, [set(range(10)), {1, 2}, {3, 4, 5}]])
def test_what_are_no_tables(tmp_path, tables):
    store, pool = open_all("host", tmp_path)
    put(store, pool)
    for use in (found(store, TOKENS).load_tables, lambda given: store.put_tables(TOKENS, given)):
        with pytest.raises(KVError, match="a list of block ids for each KV group"):
            use(tables)
    assert not store.host.stats()["held"]
    store.close()


def test_too_few_blocks_for_the_images(tmp_path):
    """The load would never end."""
    store, pool = open_all("host", tmp_path)
    put(store, pool)
    with pytest.raises(KVError, match="15 blocks came with 14 ids"):
        found(store, TOKENS).load(range(14))
    assert not store.host.stats()["held"]
    store.close()


@pytest.mark.parametrize("group", range(3))
def test_a_prefix_without_its_window_is_no_hit(opened, group):
    store, _ = opened
    tables = [list(table) for table in TABLES]
    del tables[group][0]
    assert store.put_tables(TOKENS, tables).wait(PATIENCE_S) and store.flush(PATIENCE_S)
    match = found(store, TOKENS)
    assert len(match) == 0 and not match.images
    match.drop()


def test_shorter_prefixes_have_windows_of_their_own(opened):
    store, pool = opened
    put(store, pool)
    held = {(group, 10 - len(table) + at) for group, table in enumerate(TABLES) for at in range(10)}
    for end in (4, 7):
        tables = [[], range(40, 42), range(42, 45)]
        assert store.put_tables(TOKENS[: end * BLOCK], tables).wait(PATIENCE_S)
        held |= {(1, end - 2), (1, end - 1), (2, end - 3), (2, end - 2), (2, end - 1)}
    assert store.flush(PATIENCE_S)
    hits = []
    for count in range(11):
        match = found(store, TOKENS[: count * BLOCK])
        hits.append(len(match))
        assert hits[-1] == plain_hit(count, WINDOWS, BLOCK, lambda *image: image in held)
        match.drop()
    assert len(set(hits)) > 3


def test_a_folder_with_images_of_several_sizes_is_whole_after_a_restart(tmp_path):
    store, pool = open_all("ssd", tmp_path)
    wanted = put(store, pool)
    store.close()
    folder = tmp_path / "cache"
    assert stat(folder).blocks == 15
    assert verify(folder, lambda count: lambda: None)["whole"] == 15
    store, pool = open_all("ssd", tmp_path)
    match = found(store, TOKENS)
    load = match.load_tables(TABLES)
    assert load.wait(PATIENCE_S) and load.is_whole
    assert torch.equal(pool.images[20, : SIZES[1]], wanted[20, : SIZES[1]])
    store.close()


def test_a_damaged_image_of_a_smaller_group_is_dropped(tmp_path):
    store, pool = open_all("ssd", tmp_path)
    wanted = put(store, pool)
    store.close()
    data = tmp_path / "cache" / "quire-kv.data"
    content = bytearray(data.read_bytes())
    at = content.index(wanted[21, : SIZES[1]].numpy().tobytes())
    content[at + SIZES[1] - 1] ^= 1
    data.write_bytes(content)
    store, pool = open_all("ssd", tmp_path)
    match = found(store, TOKENS)
    load = match.load_tables(TABLES)
    assert load.wait(PATIENCE_S) and not load.is_whole
    assert store.stats()["ssd"]["drops"] == {"corrupt": 1}
    assert len(found(store, TOKENS)) == 0
    store.close()
