"""The engine tells which blocks it has: the device's and its own tiers', and no others."""

import random

import pytest
from block_events import take_all
from fake_model import greedy, make_engine, run, step
from patience import PATIENCE_S

from quire.engine.schedule.no_tiers import NO_TIERS
from quire.kv.events import SHORT_KEY
from quire.kv.tiers.ssd.tier import SsdTier
from quire.replicas.prompt_keys import prompt_keys


def held(engine):
    """What is really there."""
    cache, tiering = engine.scheduler.cache, engine.scheduler.tiering
    nodes = cache.index._by_block.values()
    keys = {node.key for node in nodes}
    if tiering is not NO_TIERS:
        tiering.store.flush(PATIENCE_S)
        keys |= set(tiering.store.host._slots)
        for tier in tiering.store.tiers:
            keys |= set(tier._store.catalog.places)
    return {key[:SHORT_KEY] for key in keys}


def keys_of_other_groups(engine):
    """Those that are put from now on: no router knows them."""
    found, tiering = set(), engine.scheduler.tiering
    if tiering is not NO_TIERS:
        put_names = tiering.store.put_names

        def put(names, *more, **options):
            named = names() if callable(names) else names
            found.update(name.key[:SHORT_KEY] for name in named if name.group)
            return put_names(names, *more, **options)

        tiering.store.put_names = put
    return found


@pytest.mark.parametrize("windows", [(None,), (None, 6)], indirect=True, ids=str)
@pytest.mark.parametrize("host_slots", [None, 12])
def test_what_is_told_is_what_is_there(host_slots, windows, tmp_path):
    """Through evictions, aborts, other tenants, and a failure that takes everything back."""
    sizes = [16] * len(windows)
    tiers = [SsdTier([tmp_path], 1 << 20, sizes, 4)] if host_slots else []
    engine = make_engine(num_blocks=24, host_slots=host_slots, tiers=tiers)
    log, told, others = engine.publish_events(), set(), keys_of_other_groups(engine)
    draw = random.Random(7)
    for number in range(60):
        prompt = [draw.randrange(1, 3) for _ in range(draw.randrange(1, 30))]
        salt = draw.choice(["", "a"])
        engine.add_request(str(number), prompt, greedy(draw.randrange(1, 20)), cache_salt=salt)
        for _ in range(draw.randrange(3)):
            step(engine)
            if draw.random() < 0.3:
                take_all(log, told)
        if draw.random() < 0.2:
            engine.abort_request(str(number))
        if number == 30:
            engine.scheduler.reset(engine._unfinished())
    run(engine)
    there = held(engine) - others
    assert take_all(log, told) == there
    assert len(there) > 10
    assert bool(others) == (host_slots is not None and len(windows) > 1)
    engine.close()


def test_a_prompt_that_was_answered_is_found_by_the_keys_a_router_makes():
    engine = make_engine()
    log, told = engine.publish_events(), set()
    prompt = list(range(1, 14))
    engine.add_request("a", prompt, greedy(1), cache_salt="tenant")
    run(engine)
    take_all(log, told)
    assert set(prompt_keys(engine.observed.namespace, prompt, "tenant")) == told
    assert len(told) == 3
    engine.scheduler.cache.clear()
    assert take_all(log, told) == set()


def test_what_a_disk_kept_is_told_at_the_start(tmp_path):
    def engine_with_disk():
        return make_engine(host_slots=0, tiers=[SsdTier([tmp_path], 1 << 20, 16, 4)])

    first = engine_with_disk()
    first.add_request("a", list(range(1, 14)), greedy(1))
    run(first)
    first.close()
    second = engine_with_disk()
    keys = prompt_keys(second.observed.namespace, list(range(1, 14)))
    assert take_all(second.publish_events(), set()) == set(keys)
    second.close()
