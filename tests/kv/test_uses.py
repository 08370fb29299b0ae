"""What `match` asks for stays, without another call; and what a policy remembers is bounded."""

from __future__ import annotations

import random

import pytest
import torch
from patience import PATIENCE_S

from quire.kv import ImagePool, KVStore, Namespace, open_store
from quire.kv.policy import LearnedPolicy, LRUPolicy
from quire.kv.policy.protocol import Policy

BLOCK = 4


def make_store(capacity: int, windows: tuple[int | None, ...] = (None,)) -> KVStore:
    images = torch.zeros(32, 4096, dtype=torch.uint8)
    pool = ImagePool(images, image_bytes=[4096] * len(windows))
    namespace = Namespace("model", "float16", "float16", BLOCK, "layout", "rope")
    return open_store(pool, namespace, host_cache_bytes=capacity * 4096, windows=windows)


def prompt(number: int, num_blocks: int = 8) -> list[int]:
    return [number] * num_blocks * BLOCK


def ask(store: KVStore, tokens: list[int]) -> int:
    """As an engine does: match, load, compute the rest, put. Returns the blocks that were found."""
    match = store.match(tokens)
    assert match.wait(PATIENCE_S)
    found = len(match)
    assert match.load(range(found)).wait(PATIENCE_S)
    assert store.put(tokens, range(len(tokens) // BLOCK)).wait(PATIENCE_S)
    return found


def ask_for_groups(store: KVStore, tokens: list[int]) -> int:
    """The same with a full group and one with a window of two blocks."""
    match = store.match_tables(tokens)
    assert match.wait(PATIENCE_S)
    found = len(match)
    load = match.load_tables([range(found), range(8, 8 + found)])
    assert load.wait(PATIENCE_S) and load.is_whole
    assert store.put_tables(tokens, [range(8), range(8, 16)]).wait(PATIENCE_S)
    return found


@pytest.mark.parametrize(
    ("ask", "windows"), [(ask, (None,)), (ask_for_groups, (None, 2 * BLOCK))], ids=["one", "groups"]
)
def test_hot_prompts_are_found_among_many_that_come_once(ask, windows) -> None:
    store, draw = make_store(160 * len(windows), windows), random.Random(0)
    hot = found = 0
    for step in range(1200):
        if step % 3 == 0:
            got = ask(store, prompt(draw.randrange(10)))  # half the room would hold them all
            if step > 300:
                hot, found = hot + 8, found + got
        else:
            ask(store, prompt(1000 + step))
        assert store._uses.catch_up(PATIENCE_S)
    assert found > 0.95 * hot
    store.close()


@pytest.mark.parametrize("make", [LRUPolicy, lambda n: LearnedPolicy(n, most_ghosts=500)])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_what_is_only_ever_offered_is_forgotten_again(make, length: int) -> None:
    policy: Policy[int] = make(100)
    most = 0
    for first in range(0, 20_000, length):
        for key in range(first, first + length):
            policy.offer(key, key - 1 if key > first else None)
        most = max(most, policy.num_ghosts)
    assert len(policy) == 100
    assert most <= 500 + length
