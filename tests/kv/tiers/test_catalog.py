"""Slots are free, held, being written or being read; no transfer gets one that another has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from block_images import BLOCK_SIZE, chain, empty, image_of, keys, same
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.image import BlockName
from quire.kv.policy import LRUPolicy
from quire.kv.tiers.ssd.catalog import Catalog, Pin
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.records import RECORD, Held
from quire.kv.tiers.ssd.tier import SsdTier

NOTHING = Held.among(0, np.zeros(0, RECORD))


def catalog(slots: int, volumes: int = 1) -> Catalog:
    made = Catalog(volumes, LRUPolicy(slots * volumes))
    for volume in range(volumes):
        made.add_volume(volume, slots, NOTHING)
    return made


def hold(made: Catalog, names: list[BlockName]) -> list[int]:
    places = [taken.place for taken in made.take(names) if taken]
    for name, place in zip(names, places, strict=True):
        made.keep(name, place)
    return places


def test_a_block_that_is_read_is_not_pushed_out() -> None:
    made = catalog(2)
    old, new = chain(2), chain(2, salt=1)
    hold(made, old)
    pins = made.pin(keys(old[:1]))
    taken = made.take(new)
    assert taken[0] is not None and taken[0].was_held and taken[1] is None
    assert old[0].key in made.places and old[1].key not in made.places
    made.unpin(pins)
    assert made.take(new[1:])[0] is not None


def test_prefixes_outlive_what_follows_them() -> None:
    made = catalog(6)
    old, new = chain(3), chain(3, salt=1)
    hold(made, old + new)
    made.use(keys(old))
    hold(made, chain(4, salt=2))
    assert [key in made.places for key in keys(old + new)] == [True, True, False, *[False] * 3]


def test_a_prompt_that_does_not_fit_keeps_its_beginning() -> None:
    made = catalog(4)
    names = chain(6)
    hold(made, names[:4])
    assert made.take(names) == [None] * 6
    assert [key in made.places for key in keys(names)] == [True] * 4 + [False] * 2


def test_a_dropped_block_is_free_only_after_its_last_reader() -> None:
    made = catalog(1)
    [name], [other] = chain(1), chain(1, salt=1)
    hold(made, [name])
    first, second = made.pin([name.key]), made.pin([name.key])
    assert isinstance(first[0], Pin)
    assert made.drop(first[0]) and not made.drop(first[0])
    made.unpin(first)
    assert made.take([other]) == [None]
    made.unpin(second)
    assert made.take([other]) == [(0, False)]


def test_a_block_being_written_is_not_written_again() -> None:
    made = catalog(4)
    names = chain(1)
    assert made.take(names + names)[1] is None
    assert made.take(names) == [None]
    made.give_back(names[0], 0, usable=True)
    assert made.take(names)[0] is not None


def test_a_place_that_cannot_be_used_is_lost() -> None:
    made = catalog(1)
    [taken] = made.take(chain(1))
    assert taken is not None
    made.give_back(chain(1)[0], taken.place, usable=False)
    assert made.take(chain(1)) == [None]


def test_a_volume_that_fails_takes_its_blocks_with_it() -> None:
    made = catalog(4, volumes=2)
    names = chain(6)
    hold(made, names)
    [late] = made.take(chain(1, salt=1))
    assert late is not None and made.slot(late.place)[0] == 0
    assert made.remove_volume(0) == 3 and made.remove_volume(0) == 0
    made.keep(chain(1, salt=1)[0], late.place)  # it was under way, and came too late
    assert {made.slot(place)[0] for place in made.places.values()} == {1}
    assert made.slot(made.take(chain(1, salt=2))[0].place)[0] == 1  # type: ignore[union-attr]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("wrdpu"), st.integers(0, 9)), max_size=60))
def test_no_slot_is_ever_in_two_places(steps: list[tuple[str, int]]) -> None:
    made, slots = catalog(4), 4
    names = [chain(1, salt)[0] for salt in range(10)]
    writing: list[tuple[BlockName, int]] = []
    reading: list[Pin] = []
    for action, number in steps:
        name = names[number]
        if action == "w" and (taken := made.take([name])[0]):
            writing.append((name, taken.place))
        elif action == "d" and writing:
            made.keep(*writing.pop(number % len(writing)))
        elif action == "r":
            reading += [pin for pin in made.pin([name.key]) if pin]
        elif action == "p" and reading:
            made.drop(reading[number % len(reading)])
        elif action == "u" and reading:
            made.unpin([reading.pop(number % len(reading))])
        held = list(made.places.values())
        taken_now = [place for _, place in writing]
        read = {pin.place for pin in reading} - set(held)
        free = list(made._free[0])
        everything = held + taken_now + list(read) + free
        assert sorted(everything) == list(range(slots))


@pytest.mark.parametrize("threads", [6])
def test_full_and_under_pressure_nothing_is_ever_mixed_up(tmp_path: Path, threads: int) -> None:
    """Fifty prompts with an image of their own each go in and out of a tier that holds five."""
    image_bytes = 30_000
    quota = Geometry(image_bytes, BLOCK_SIZE).quota_for(10)
    tier = SsdTier([tmp_path], quota, image_bytes, BLOCK_SIZE, policy=LRUPolicy(10))
    start = threading.Barrier(threads)

    def session(first: int) -> int:
        start.wait()
        hits = 0
        for salt in range(first, 50, threads):
            names = chain(2, salt)
            images = [image_of(name, image_bytes) for name in names]
            tier.write(names, images)
            for again in (salt, max(0, salt - threads), (7 * salt) % 50):
                wanted, found = chain(2, again), empty(2, image_bytes)
                tier.use(keys(wanted))
                for at, is_whole in enumerate(tier.read(wanted, found)):
                    right = image_of(wanted[at], image_bytes)
                    assert not is_whole or same([found[at]], [right], image_bytes)
                    hits += is_whole
        return hits

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(session, range(threads))) > 50
    assert not tier.counters.drops and tier.stats()["evicted"] > 20
    tier.close()
