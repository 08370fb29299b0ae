"""The picture of the blocks agrees with the allocator, whatever its scale."""

from __future__ import annotations

import json
from base64 import b64decode

import numpy as np
import pytest
from fake_model import greedy, make_engine, run, step
from patience import PATIENCE_S

from quire.engine.observe import block_map
from quire.engine.observe.introspection import views
from quire.errors import RequestError


def planes(tier):
    return np.frombuffer(b64decode(tier["picture"]), dtype=np.uint8).reshape(-1, tier["cells"])


def running(**options):
    """Two requests with a common prefix of two blocks, and one of another tenant."""
    engine = make_engine(num_blocks=24, **options)
    common = list(range(1, 9))
    engine.add_request("a", [*common, 9, 10], greedy(12))
    engine.add_request("b", [*common, 11, 12, 13], greedy(12))
    engine.add_request("c", [20] * 5, greedy(12), cache_salt="other")
    for _ in range(3):
        step(engine)
    return engine


def test_a_cell_for_each_block():
    engine = running()
    found = views(engine)["blocks"]()
    device = found["tiers"]["device"]
    holders, low, high = planes(device)
    allocator = engine.scheduler.cache.allocator
    keyed = [allocator.is_keyed(b) for b in range(24)]
    expected = [n + 1 if n else int(k) for n, k in zip(allocator.ref_counts, keyed, strict=True)]
    assert holders.tolist() == expected and 3 in expected
    assert device["shared"] == 2 and device["free"] + device["in_use"] + device["cached"] == 24
    owners = device["owners"]
    assert [owner["request"] for owner in owners] == ["a", "b", "c"]
    for block, place in enumerate((low + 256 * high.astype(int)).tolist()):
        if place:
            sequence = next(
                s for s in engine.scheduler.running if s.request.id == owners[place - 1]["request"]
            )
            assert block in sequence.table.ids
        else:
            assert allocator.ref_counts[block] == 0
    assert json.loads(json.dumps(found)) == found


def test_other_tenants_have_no_names():
    engine = running()
    owners = views(engine)["blocks"](tenant="other")["tiers"]["device"]["owners"]
    assert [owner["request"] for owner in owners] == [None, None, "c"]
    table = engine.scheduler.running[0].table.ids
    seen = views(engine)["block"](int(table[0]), tenant="other")
    assert seen["holders"] == 2 and seen["requests"] == [] and seen["tokens"] == 0
    run(engine)
    assert views(engine)["block"](int(table[0]), tenant="other")["tokens"] == 0
    assert views(engine)["block"](int(table[0]))["tokens"] == 4


def test_one_block():
    engine = running()
    a, b, _ = engine.scheduler.running
    shared, last = int(a.table.ids[1]), int(b.table.ids[-1])
    seen = views(engine)["block"](shared)
    assert seen["state"] == "shared" and seen["tokens"] == 4
    assert [(r["request"], r["place"]) for r in seen["requests"]] == [("a", 1), ("b", 1)]
    assert views(engine)["block"](last)["state"] == "in use"
    free = engine.scheduler.cache.allocator._free[0]
    nothing = {"state": "free", "holders": 0, "requests": [], "tokens": 0, "text": ""}
    assert views(engine)["block"](free) == {"block": free, **nothing}
    assert views(engine)["block"](0, count=24)["state"] == "shared"
    run(engine)
    assert views(engine)["block"](shared)["state"] == "cached"
    for bad in ({"block": 24}, {"block": -1}, {"block": 0, "count": 0}):
        with pytest.raises(RequestError):
            views(engine)["block"](**bad)


def test_runs_of_blocks_where_there_are_many(monkeypatch):
    monkeypatch.setattr(block_map, "MOST_CELLS", 5)
    engine = running()
    device = views(engine)["blocks"]()["tiers"]["device"]
    assert device["cells"] == 5 and device["blocks_per_cell"] == 5
    holders, _, _, in_use, cached = planes(device)
    counts = np.array([*engine.scheduler.cache.allocator.ref_counts, 0]).reshape(5, 5)
    assert holders.tolist() == [row.max() + 1 if row.any() else 0 for row in counts]
    assert in_use.tolist() == [int(np.ceil((row > 0).mean() * 255)) for row in counts]
    run(engine)
    *_, in_use, cached = planes(views(engine)["blocks"]()["tiers"]["device"])
    assert not in_use.any() and cached.any()


def test_a_large_pool_is_a_small_answer():
    engine = make_engine(num_blocks=300_000, max_seqs=64, budget=8192)
    for number in range(64):
        engine.add_request(str(number), [number % 49 + 1] * 100, greedy(4))
    engine.step()
    engine.step()
    answer = views(engine)["blocks"]()
    assert len(json.dumps(answer)) < 80_000
    device = answer["tiers"]["device"]
    assert device["cells"] <= 8192 and planes(device)[0].any()


def test_slots_of_host_memory():
    engine = make_engine(num_blocks=8, host_slots=4)
    for salt in range(3):
        engine.add_request(str(salt), [salt + 1] * 9, greedy(2))
        run(engine)
    engine.scheduler.tiering.store.flush(PATIENCE_S)
    host = views(engine)["blocks"]()["tiers"]["host"]
    kept = engine.scheduler.tiering.store.host
    assert host["cached"] == len(kept) == 4 and host["in_use"] == 0
    assert host["total"] == host["free"] + host["cached"] == kept.memory.num_slots
    assert planes(host)[0].tolist() == [slot in kept._keys for slot in range(host["total"])]
