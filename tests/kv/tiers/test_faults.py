"""Disks that fail and files that were tampered with: a miss, dropped, counted; never wrong."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, keys, same
from faulty_disk import FaultyDisk, OneByOne
from tier_harness import flip

from quire.kv.tiers.ssd.geometry import DATA_FILE, INDEX_FILE, RECORD_BYTES, Geometry
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.ssd.volume import ERRORS_IN_A_ROW
from quire.kv.tiers.tier import PAGE

IMAGE_BYTES = 10_000
GEOMETRY = Geometry(IMAGE_BYTES, BLOCK_SIZE)
SLOTS = 6


def open_tier(folder: Path, slots: int = SLOTS) -> SsdTier:
    quota = GEOMETRY.quota_for(slots)
    return SsdTier([folder], quota, IMAGE_BYTES, BLOCK_SIZE, engine=OneByOne())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(monkeypatch, tmp_path)


def what_is_whole(tier: SsdTier, count: int = 4, salt: int = 0) -> list[bool]:
    """Which blocks can be read; those must be right."""
    names, images = chain(count, salt), filled(count, IMAGE_BYTES, seed=salt)
    found = empty(count, IMAGE_BYTES)
    whole = tier.read(names, found)
    for is_whole, image, wanted in zip(whole, found, images, strict=True):
        assert not is_whole or same([image], [wanted], IMAGE_BYTES)
    return whole


def write(tier: SsdTier, count: int = 4, salt: int = 0) -> list[bool]:
    return tier.write(chain(count, salt), filled(count, IMAGE_BYTES, seed=salt))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"write_error": errno.ENOSPC}, "no space"),
        ({"write_error": errno.EDQUOT}, "no space"),
        ({"write_error": errno.EIO}, "io error"),
        ({"short_by": 4096}, "io error"),
        ({"index_error": errno.ENOSPC}, "no space"),
        ({"index_error": errno.EIO}, "io error"),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    disk: FaultyDisk, tmp_path: Path, fault: dict[str, int], reason: str
) -> None:
    tier = open_tier(tmp_path)
    assert write(tier, 2, salt=1) == [True, True]
    vars(disk).update(fault)
    assert write(tier, 2) == [False, False]
    vars(disk).update(dict.fromkeys(fault, 0))
    assert tier.counters.drops == {reason: 2}
    assert what_is_whole(tier, 2) == [False, False]
    assert what_is_whole(tier, 2, salt=1) == [True, True]  # it goes on as before
    tier.close()
    again = open_tier(tmp_path)
    assert again.contains(keys(chain(2) + chain(2, salt=1))) == [False, False, True, True]
    assert write(again, 2) == [True, True]
    again.close()


@pytest.mark.parametrize(
    ("fault", "reason"), [({"read_error": errno.EIO}, "io error"), ({"short_by": 1}, "torn")]
)
def test_a_read_that_fails_is_a_miss_for_good(
    disk: FaultyDisk, tmp_path: Path, fault: dict[str, int], reason: str
) -> None:
    tier = open_tier(tmp_path)
    write(tier)
    vars(disk).update(fault)
    assert what_is_whole(tier, 2) == [False, False]
    vars(disk).update(dict.fromkeys(fault, 0))
    assert tier.counters.drops == {reason: 2}
    assert what_is_whole(tier) == [False, False, True, True]
    tier.close()
    again = open_tier(tmp_path)
    assert what_is_whole(again) == [False, False, True, True]
    again.close()


def test_the_old_block_stays_when_its_record_cannot_be_cleared(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    """It is forgotten for now, but what is on disk still agrees with itself."""
    tier = open_tier(tmp_path, slots=4)
    write(tier)
    disk.index_error = errno.EIO
    assert write(tier, 2, salt=1) == [False, False]
    disk.index_error = 0
    tier.close()
    again = open_tier(tmp_path, slots=4)
    assert what_is_whole(again) == [True] * 4
    again.close()


def test_a_folder_that_keeps_failing_is_left_alone(disk: FaultyDisk, tmp_path: Path) -> None:
    quota = 2 * GEOMETRY.quota_for(8)
    folders = [tmp_path / "good", tmp_path / "bad"]
    tier = SsdTier(folders, quota, IMAGE_BYTES, BLOCK_SIZE, engine=OneByOne())
    assert all(write(tier, 12))
    disk.folder = folders[1]
    disk.read_error = disk.write_error = disk.index_error = errno.EIO
    assert what_is_whole(tier, 12) == [True, False] * 6  # they are striped
    assert tier.stats()["failed_folders"] == [str(folders[1])]
    assert tier.stats()["slots"] == 8
    assert tier.counters.drops == {"io error": 6}
    assert write(tier, 8, salt=1) == [True] * 8  # all of it goes to the other one
    assert what_is_whole(tier, 8, salt=1) == [True] * 8
    tier.close()


def test_one_bad_spot_does_not_cost_the_folder(disk: FaultyDisk, tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for salt in range(ERRORS_IN_A_ROW):
        write(tier, 2, salt)
        disk.read_error = errno.EIO
        assert what_is_whole(tier, 1, salt) == [False]
        disk.read_error = 0
        assert what_is_whole(tier, 2, salt) == [False, True]
    assert tier.stats()["failed_folders"] == []
    tier.close()


def test_a_folder_that_cannot_be_read_at_the_start_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pread = os.pread

    def failing(fd: int, size: int, offset: int) -> bytes:
        if "bad" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "injected")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    folders, quota = [tmp_path / "bad", tmp_path / "good"], 2 * GEOMETRY.quota_for(4)
    tier = SsdTier(folders, quota, IMAGE_BYTES, BLOCK_SIZE, engine=OneByOne())
    assert write(tier) == [True] * 4
    assert tier.stats()["slots"] == 4
    tier.close()


def test_a_disk_without_room_keeps_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from quire.kv.tiers.ssd import files

    def full(fd: int, start: int, end: int) -> None:
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(files, "allocate", full)
    tier = open_tier(tmp_path)
    assert tier.stats()["slots"] == 0
    assert write(tier) == [False] * 4
    assert tier.counters.drops == {"no space": 4}
    tier.close()


# What was on disk when the engine was not running: (what is done, blocks left, counted as).

SLOT, RECORD = GEOMETRY.slot_bytes, RECORD_BYTES
DAMAGES: dict[str, tuple[Callable[[Path], None], int, dict[str, int]]] = {
    "a bit of an image": (lambda at: flip(at / DATA_FILE, SLOT + PAGE + 9), 3, {"corrupt": 1}),
    "a bit of a header's key": (lambda at: flip(at / DATA_FILE, SLOT + 30), 3, {"foreign": 1}),
    "a bit of a header's magic": (lambda at: flip(at / DATA_FILE, SLOT + 1), 3, {"torn": 1}),
    "a bit of a header's checksum": (lambda at: flip(at / DATA_FILE, SLOT + 16), 3, {"corrupt": 1}),
    "a bit of a header's tokens": (lambda at: flip(at / DATA_FILE, SLOT + 130), 3, {"foreign": 1}),
    "a bit of a record": (lambda at: flip(at / INDEX_FILE, PAGE + RECORD + 5), 3, {"torn": 1}),
    "a bit of a record's check": (
        lambda at: flip(at / INDEX_FILE, PAGE + RECORD + 112),
        3,
        {"torn": 1},
    ),
    "a bit of a time of use": (lambda at: flip(at / INDEX_FILE, PAGE + RECORD + 120), 4, {}),
    "a bit of the first page": (lambda at: flip(at / INDEX_FILE, 20), 0, {"torn": 1}),
    "an empty index": (lambda at: os.truncate(at / INDEX_FILE, 0), 0, {"torn": 1}),
    "no index": (lambda at: (at / INDEX_FILE).unlink(), 0, {"torn": 1}),
    "half an index": (lambda at: os.truncate(at / INDEX_FILE, PAGE + 2 * RECORD), 2, {}),
    "a record cut in two": (
        lambda at: os.truncate(at / INDEX_FILE, PAGE + RECORD + 50),
        1,
        {"torn": 1},
    ),
    "empty data": (lambda at: os.truncate(at / DATA_FILE, 0), 0, {"torn": 4}),
    "no data": (lambda at: (at / DATA_FILE).unlink(), 0, {"torn": 4}),
    "half the data": (lambda at: os.truncate(at / DATA_FILE, 2 * SLOT + 99), 2, {"torn": 2}),
    "data of a hole": (lambda at: punch(at / DATA_FILE, SLOT, SLOT), 3, {"torn": 1}),
    "the slot of another": (lambda at: copy_slot(at, 0, 1), 3, {"foreign": 1}),
    "the record of another": (lambda at: copy_record(at, 0, 1), 2, {"foreign": 1}),
}


def punch(path: Path, offset: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(size))


def copy_slot(folder: Path, source: int, target: int) -> None:
    data = (folder / DATA_FILE).read_bytes()[source * SLOT : (source + 1) * SLOT]
    with (folder / DATA_FILE).open("r+b") as file:
        file.seek(target * SLOT)
        file.write(data)


def copy_record(folder: Path, source: int, target: int) -> None:
    """A right name for a slot with another block: the name is not believed."""
    with (folder / INDEX_FILE).open("r+b") as file:
        file.seek(PAGE + source * RECORD)
        record = file.read(RECORD)
        file.seek(PAGE + target * RECORD)
        file.write(record)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_done_in_between_is_missed_dropped_and_counted(tmp_path: Path, damage: str) -> None:
    do, left, counted = DAMAGES[damage]
    tier = open_tier(tmp_path)
    assert write(tier) == [True] * 4
    tier.close()
    do(tmp_path)
    again = open_tier(tmp_path)
    assert sum(what_is_whole(again)) == left
    assert again.counters.drops == counted
    again.close()
    again = open_tier(tmp_path)
    assert sum(what_is_whole(again)) == left and not again.counters.drops  # gone for good
    assert write(again) == [True] * 4  # what was lost is written anew
    assert what_is_whole(again) == [True] * 4
    again.close()
    last = open_tier(tmp_path)
    assert what_is_whole(last) == [True] * 4
    assert not last.counters.drops
    last.close()
