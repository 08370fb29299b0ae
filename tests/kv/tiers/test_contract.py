"""What every tier has to do, whatever it is made of."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from block_images import chain, empty, filled, image_of, keys, same
from tier_harness import IMAGE_BYTES, Harness

from quire.kv.image import BlockName
from quire.kv.tiers.tier import Tier


@pytest.fixture
def tier(harness: Harness) -> Tier:
    return harness.open()


def read_back(tier: Tier, names: list[BlockName]) -> tuple[list[bool], list[memoryview]]:
    images = empty(len(names), IMAGE_BYTES)
    return tier.read(names, images), images


def test_what_was_written_is_read(tier: Tier) -> None:
    names, images = chain(10), filled(10, IMAGE_BYTES)
    assert tier.contains(keys(names)) == [False] * 10
    assert tier.write(names, images) == [True] * 10
    assert tier.contains(keys(names)) == [True] * 10
    whole, found = read_back(tier, names)
    assert all(whole) and same(found, images, IMAGE_BYTES)


def test_any_order_and_any_part_can_be_read(tier: Tier) -> None:
    names, images = chain(8), filled(8, IMAGE_BYTES)
    tier.write(names, images)
    order = [5, 0, 7, 5]  # one of them twice
    whole, found = read_back(tier, [names[at] for at in order])
    assert all(whole) and same(found, [images[at] for at in order], IMAGE_BYTES)


def test_nothing_to_do_is_nothing_done(tier: Tier) -> None:
    tier.use([])
    assert (tier.contains([]), tier.read([], []), tier.write([], [])) == ([], [], [])


def test_absent_blocks_are_missed_one_by_one(tier: Tier) -> None:
    names, images = chain(6), filled(6, IMAGE_BYTES)
    tier.write(names[::2], images[::2])
    assert tier.contains(keys(names)) == [True, False] * 3
    whole, found = read_back(tier, names)
    assert whole == [True, False] * 3
    assert same(found[::2], images[::2], IMAGE_BYTES)
    assert not any(tier.counters.drops.values())  # not to be there is no fault


@pytest.mark.parametrize("field", ["parent", "root", "tokens"])
def test_the_right_key_alone_gives_nothing(tier: Tier, field: str) -> None:
    """Were a key ever made to collide, the block behind it is still not another's."""
    [name] = chain(1)
    tier.write([name], filled(1, IMAGE_BYTES))
    liar = name._replace(**{field: b"\xff" + getattr(name, field)[1:]})
    whole, _ = read_back(tier, [liar])
    assert whole == [False]
    assert tier.counters.drops["foreign"] == 1


def test_a_corrupt_block_is_missed_dropped_and_counted(harness: Harness) -> None:
    tier = harness.open()
    names, images = chain(3), filled(3, IMAGE_BYTES)
    tier.write(names, images)
    harness.flip_a_bit(names[2])
    assert read_back(tier, names)[0] == [True, True, False]
    assert tier.counters.drops == {"corrupt": 1}
    assert tier.contains(keys(names)) == [True, True, False]
    assert tier.write(names, images) == [True] * 3  # it is welcome again
    whole, found = read_back(tier, names)
    assert all(whole) and same(found, images, IMAGE_BYTES)


def test_a_block_is_kept_once(tier: Tier) -> None:
    names, images = chain(4), filled(4, IMAGE_BYTES)
    assert tier.write(names, images) == [True] * 4
    assert tier.write(names, images) == [True] * 4
    assert tier.write([names[0], names[0]], [images[0], images[0]]) == [True, True]
    assert same(read_back(tier, names)[1], images, IMAGE_BYTES)


def test_buffers_of_the_writer_are_not_touched(tier: Tier) -> None:
    images = filled(4, IMAGE_BYTES)
    before = [bytes(image) for image in images]
    tier.write(chain(4), images)
    assert [bytes(image) for image in images] == before


def test_buffers_of_absent_blocks_are_not_touched(tier: Tier) -> None:
    images = filled(2, IMAGE_BYTES)
    before = [bytes(image) for image in images]
    assert tier.read(chain(2), images) == [False, False]
    assert [bytes(image) for image in images] == before


def test_traffic_is_counted(tier: Tier) -> None:
    names = chain(5)
    tier.write(names, filled(5, IMAGE_BYTES))
    read_back(tier, [*names, *chain(2, salt=9)])
    told = tier.stats()
    for way in ("reads", "writes"):
        assert told[way]["blocks"] == 5
        assert told[way]["bytes"] == 5 * IMAGE_BYTES
        assert told[way]["seconds"] > 0


def test_many_threads_read_and_write_at_once(tier: Tier) -> None:
    """Each thread has its own prompt, and all share one: none ever sees another's bytes."""
    shared = chain(4, salt=99)
    start = threading.Barrier(6)

    def session(salt: int) -> bool:
        start.wait()
        fine = True
        for part in range(5):
            names = [*chain(5, salt=salt)[part : part + 1], *shared]
            images = [image_of(name, IMAGE_BYTES) for name in names]
            tier.write(names, images)
            whole, found = read_back(tier, names)
            got = [at for at, is_whole in enumerate(whole) if is_whole]
            fine &= whole[0] and same([found[at] for at in got], [images[at] for at in got], 20_000)
        return fine

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(session, range(6)))
    assert not any(tier.counters.drops.values())
    assert all(read_back(tier, shared)[0])


def test_a_closed_tier_holds_nothing(tier: Tier) -> None:
    names, images = chain(2), filled(2, IMAGE_BYTES)
    tier.write(names, images)
    tier.close()
    tier.close()
    tier.use(keys(names))
    assert tier.contains(keys(names)) == [False, False]
    assert tier.read(names, images) == [False, False]
    assert tier.write(names, images) == [False, False]
    assert tier.stats()["writes"]["blocks"] == 2


def test_another_tier_finds_what_was_written(harness: Harness) -> None:
    if not harness.survives_close:
        pytest.skip("this kind forgets")
    names, images = chain(7), filled(7, IMAGE_BYTES)
    first = harness.open()
    first.write(names, images)
    first.close()
    second = harness.open()
    assert second.contains(keys(names)) == [True] * 7
    whole, found = read_back(second, names)
    assert all(whole) and same(found, images, IMAGE_BYTES)
