"""Copies give way to the engine's thread while it plans and launches, but never for long."""

from __future__ import annotations

import time

import numpy as np
import torch

from quire.kv import foreground
from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.policy import LRUPolicy
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory

IMAGE = 5000
TOKENS = np.arange(8, dtype=np.int32)
PATIENCE = 120.0


def make_store():
    pool = ImagePool(torch.zeros((4, IMAGE), dtype=torch.uint8))
    host = HostTier(HostMemory(IMAGE, 8, pinned=False), LRUPolicy(4))
    return KVStore(pool, Namespace("model", "float32", "float32", 4, "layout", "rope"), host)


def test_nothing_is_copied_while_the_engine_is_busy(monkeypatch):
    monkeypatch.setattr(foreground, "MOST_S", PATIENCE)
    store = make_store()
    store.foreground.begin()
    put = store.put(TOKENS, [0, 1])
    assert not put.wait(0.2)
    assert len(store.host) == 0
    store.foreground.end()
    assert put.wait(PATIENCE)
    assert len(store.host) == 2
    store.close()


def test_an_engine_that_is_always_busy_holds_no_copy_up_for_good():
    store = make_store()
    store.foreground.begin()
    assert store.put(TOKENS, [0, 1]).wait(PATIENCE)
    assert len(store.host) == 2
    store.close()


def test_an_engine_that_says_nothing_more_is_waited_for_once(monkeypatch):
    engine = foreground.Foreground()
    engine.begin()
    engine.give_way()
    monkeypatch.setattr(foreground, "MOST_S", PATIENCE)
    began = time.monotonic()
    engine.give_way()
    assert time.monotonic() - began < PATIENCE / 2
