"""Packs on a shared mount: found by their names, whole or not there, within a quota."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from archive_packs import packs
from block_images import chain, empty, filled, image_of, keys, same
from effort import effort
from patience import PATIENCE_S, eventually
from remote_blocks import VALUE_BYTES, stored_key

from quire.errors import ConfigError
from quire.kv.image import header
from quire.kv.tiers.remote.archive import keeper
from quire.kv.tiers.remote.archive.client import ArchiveClient
from quire.kv.tiers.remote.archive.folder import Folder
from quire.kv.tiers.remote.archive.index import PackIndex
from quire.kv.tiers.remote.archive.keeper import sweep
from quire.kv.tiers.remote.archive.pack import (
    MOST_BLOCKS,
    PACK_BYTES,
    Span,
    cut_into_packs,
    pack_name,
    packed_bytes,
    read_name,
    short_key,
)
from quire.kv.tiers.remote.client import Value
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.tier import Tier

IMAGE = 5_000
OpenTier = Callable[..., Tier]


# --- names ----------------------------------------------------------------------------------------


def test_a_name_says_which_blocks_and_where() -> None:
    [name] = chain(1)
    assert short_key(stored_key(name)) == int.from_bytes(name.key[:8], "big")
    keys, sizes = [0, 2**64 - 1, *range(5, 18)], [1, 2**32 - 1, *range(10, 23)]
    made = pack_name("0123456789abcdef", keys, sizes)
    spans = read_name(made)
    assert spans is not None and list(spans) == keys
    assert spans[2**64 - 1] == Span(1, 2**32 - 1) and spans[5] == Span(2**32, 10)
    assert packed_bytes(made) == sum(sizes)
    assert len(keys) == MOST_BLOCKS and len(made.split("/")[1]) <= 255


@pytest.mark.parametrize(
    "name",
    ["", "sweeper.json", "x/AAAA", "0123456789abcdef/", "0123456789abcdef/AAAA", "0" * 16 + "/é"],
)
def test_what_is_no_pack_is_left_alone(name: str) -> None:
    assert read_name(name) is None
    index = PackIndex()
    index.add(name)
    index.end_listing([name])
    assert not index.packs() and not index.total_bytes


def test_packs_are_megabytes_but_no_more() -> None:
    assert list(cut_into_packs([])) == []
    small, large = [368_640] * 40, [2_359_296] * 7
    assert [cut.stop - cut.start for cut in cut_into_packs(small)] == [15, 15, 10]
    assert [cut.stop - cut.start for cut in cut_into_packs(large)] == [3, 3, 1]
    assert [cut.stop - cut.start for cut in cut_into_packs([2 * PACK_BYTES] * 2)] == [1, 1]


def test_an_index_knows_every_pack_of_a_block() -> None:
    """With one of two packs gone the block is found in the other."""
    one, two = (pack_name("0" * 16, [7, other], [1, 1]) for other in (8, 9))
    index = PackIndex()
    index.end_listing([one, two])
    assert index.find([7, 8, 9, 10]) == [two, one, two, None] or index.find([7]) == [one]
    index.discard(two)
    assert index.find([7, 9]) == [one, None]
    assert index.good_of_bad(one) is None
    index.mark_bad(one, 7)
    assert index.find([7, 8]) == [None, one] and index.good_of_bad(one) == {8: Span(1, 1)}
    index.mark_bad(one, 8)
    assert index.good_of_bad(one) == {}
    index.add(one)  # it was written again
    assert index.find([7, 8]) == [one, one]
    assert index.total_bytes == 2


def test_what_goes_during_a_listing_does_not_come_back() -> None:
    index, name = PackIndex(), pack_name("0" * 16, [1], [1])
    index.add(name)
    index.begin_listing()
    index.discard(name)
    index.end_listing([name])  # it saw the pack before
    assert index.find([1]) == [None] and not index.total_bytes
    index.begin_listing()
    index.end_listing([name])  # another machine has written it
    assert index.find([1]) == [name]


def test_what_is_written_during_a_listing_stays() -> None:
    index, name = PackIndex(), pack_name("0" * 16, [1], [1])
    index.begin_listing()
    index.add(name)
    index.end_listing([])  # it was made before the pack was
    assert index.packs() == [name]
    index.begin_listing()
    index.end_listing([])
    assert not index.packs()


# --- several machines -----------------------------------------------------------------------------

WRITER = """
import sys
from block_images import BLOCK_SIZE, chain, empty, image_of, same
from quire.kv.tiers.remote.open import open_remote
url, rounds, image_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
names = chain(6)
images = [image_of(name, image_bytes) for name in names]
for at in range(rounds):
    tier = open_remote(url + "?timeout=60", image_bytes, BLOCK_SIZE)
    tier._client.index.end_listing([])  # as if it had listed before the other wrote
    assert all(tier.write(names[at % 3 :], images[at % 3 :]))
    found = empty(6, image_bytes)
    whole = tier.read(names, found)
    got = [i for i, good in enumerate(whole) if good]
    assert len(got) >= 6 - at % 3
    assert same([found[i] for i in got], [images[i] for i in got], image_bytes)
    assert not tier.counters.drops, tier.counters.drops
    tier.close()
"""


def test_processes_that_write_the_same_keys_read_no_torn_block(mount: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", WRITER, f"file://{mount}", "40", "200000"]
    env = os.environ | {"PYTHONPATH": path}
    writers = [subprocess.Popen(command, env=env) for _ in range(2)]
    assert [writer.wait(PATIENCE_S) for writer in writers] == [0, 0]
    assert not list(mount.rglob(".aside-*"))


def test_another_machine_finds_a_block_after_its_next_listing(
    mount: Path, open_tier: OpenTier
) -> None:
    names, images = chain(3), filled(3, IMAGE)
    one = open_tier(f"file://{mount}", IMAGE)
    other = open_tier(f"file://{mount}?refresh=0.1", IMAGE)
    assert not any(other.contains(keys(names)))
    one.write(names, images)
    eventually(lambda: all(other.contains(keys(names))))
    found = empty(3, IMAGE)
    assert all(other.read(names, found)) and same(found, images, IMAGE)


def test_a_pack_that_another_machine_swept_is_a_miss_and_no_fault(
    mount: Path, open_tier: OpenTier
) -> None:
    names, images = chain(3), filled(3, IMAGE)
    tier = open_tier(f"file://{mount}", IMAGE)
    tier.write(names, images)
    [pack] = packs(mount)
    pack.unlink()
    assert tier.read(names, empty(3, IMAGE)) == [False] * 3
    assert not any(tier.contains(keys(names))) and not tier.counters.drops
    assert tier.stats()["errors"] == 0
    assert all(tier.write(names, images)) and all(tier.read(names, empty(3, IMAGE)))


# --- what a mount does to files -------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 150, IMAGE])
def test_a_file_that_was_cut_short_is_torn(mount: Path, open_tier: OpenTier, left: int) -> None:
    names, images = chain(2), filled(2, IMAGE)
    tier = open_tier(f"file://{mount}", IMAGE)
    tier.write(names, images)
    os.truncate(packs(mount)[0], left)
    assert tier.read(names, empty(2, IMAGE)) == [False, False]
    assert tier.counters.drops == {"torn": 2}
    eventually(lambda: not packs(mount))  # nothing of it was of use
    assert all(tier.write(names, images)) and all(tier.read(names, empty(2, IMAGE)))


def test_a_full_disk_refuses_and_still_serves(
    mount: Path, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, images = chain(4), filled(4, IMAGE)
    tier = open_tier(f"file://{mount}", IMAGE)
    tier.write(names[:2], images[:2])

    def full(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("quire.kv.tiers.remote.archive.folder.os.write", full)
        assert tier.write(names[2:], images[2:]) == [False, False]
    told = tier.stats()
    assert told["drops"] == {"refused": 2} and "No space left" in told["last_refusal"]
    assert told["breaker"] == "closed" and all(tier.read(names[:2], empty(2, IMAGE)))
    assert not list(mount.rglob(".aside-*"))


def test_stores_that_fail_now_and_then_leave_nothing_to_find(
    mount: Path, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed store that stays visible is a wrong answer some day: every later hit is verified."""
    dice, write, replace = random.Random(7), os.write, os.replace

    def failing_write(fd: int, data: memoryview) -> int:
        if dice.random() < 0.1:
            raise OSError(dice.choice([errno.EIO, errno.ENOSPC, errno.ESTALE]), "no")
        return write(fd, data[: dice.choice([None, 1000])])  # and short ones, which are no fault

    def failing_replace(source: Path, target: Path) -> None:
        if dice.random() < 0.1:
            raise OSError(errno.EIO, "no")
        replace(source, target)

    held: dict[int, bool] = {}
    tier = open_tier(f"file://{mount}", IMAGE)
    with monkeypatch.context() as patch:
        patch.setattr("quire.kv.tiers.remote.archive.folder.os.write", failing_write)
        patch.setattr("quire.kv.tiers.remote.archive.folder.os.replace", failing_replace)
        for salt in range(60):
            told = tier.write(chain(3, salt), [image_of(name, IMAGE) for name in chain(3, salt)])
            assert len(set(told)) == 1  # a pack is whole or not there
            held[salt] = told[0]
            eventually(lambda: tier.stats()["breaker"] == "closed")
    assert 5 < sum(held.values()) < 55 and not list(mount.rglob(".aside-*"))
    for reader in (tier, open_tier(f"file://{mount}", IMAGE)):
        for salt, is_held in held.items():
            names, found = chain(3, salt), empty(3, IMAGE)
            assert reader.contains(keys(names)) == reader.read(names, found) == [is_held] * 3
            if is_held:
                assert same(found, [image_of(name, IMAGE) for name in names], IMAGE)
        assert not {"torn", "foreign", "corrupt"} & set(reader.counters.drops)


@pytest.mark.parametrize("stranger", ["of another format", "of another model"])
def test_a_chain_with_a_foreign_block_is_whole_but_for_it(
    mount: Path, open_tier: OpenTier, stranger: str
) -> None:
    """Each value is read by its own header, never by that of the first of its pack."""
    names, images = chain(5), filled(5, IMAGE)
    parts = [header(n, i[:IMAGE]) + i[:IMAGE] for n, i in zip(names, images, strict=True)]
    if stranger == "of another format":
        parts[2] = header(names[2], images[2][: IMAGE // 2]) + images[2][: IMAGE // 2]
    else:
        other = names[2]._replace(root=bytes(31) + b"x")
        parts[2] = header(other, images[2][:IMAGE]) + images[2][:IMAGE]
    folder = Folder(mount, 1)
    folder.check()
    shorts = [short_key(stored_key(name)) for name in names]
    folder.write(pack_name("0" * 16, shorts, [*map(len, parts)]), b"".join(parts))
    tier, found = open_tier(f"file://{mount}", IMAGE), empty(5, IMAGE)
    assert tier.read(names, found) == [True, True, False, True, True]
    assert tier.counters.drops == {"torn" if stranger == "of another format" else "foreign": 1}
    kept = [0, 1, 3, 4]
    assert same([found[at] for at in kept], [images[at] for at in kept], IMAGE)
    assert tier.contains(keys(names)) == [True, True, False, True, True]


def test_a_reader_that_is_left_behind_touches_no_buffer(
    mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has given its memory to another block by the time a mount answers."""
    names, images = chain(1), filled(1, IMAGE)
    client = ArchiveClient(Folder(mount, 1), timeout=PATIENCE_S, refresh=60.0)
    client.connect()
    head = memoryview(bytearray(VALUE_BYTES))
    stored = Value(memoryview(header(names[0], images[0][:IMAGE])), images[0][:IMAGE])
    key = [stored_key(names[0])]
    assert list(client.store(key, [stored], Deadline(PATIENCE_S))) == [(0, "")]
    answers, read = threading.Event(), Folder.read

    def late(*args: object) -> object:
        assert answers.wait(PATIENCE_S)
        yield from read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "read", late)
    place = Value(head[: len(stored.head)], empty(1, IMAGE)[0][:IMAGE])
    with pytest.raises(TimeoutError):
        list(client.fetch(key, [place], Deadline(0.05)))
    answers.set()
    client.close()
    eventually(lambda: not any("remote-worker" in t.name for t in threading.enumerate()))
    assert not any(place.image) and not any(place.head)


def test_a_mount_point_is_not_created(tmp_path: Path, open_tier: OpenTier) -> None:
    tier = open_tier(f"file://{tmp_path}/gone", IMAGE)
    assert tier.stats()["breaker"] == "open" and "mount or create it" in tier.stats()["last_error"]
    assert not (tmp_path / "gone").exists()


def test_threads_and_files_do_not_leak(mount: Path, open_tier: OpenTier) -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("quire-remote")}

    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    # Fewer may be left: what tests before this one had may end only now.
    threads_before, files_before = threads(), num_files()
    tier = open_tier(f"file://{mount}", IMAGE)
    names, images = chain(20), filled(20, IMAGE)
    assert all(tier.write(names, images)) and all(tier.read(names, empty(20, IMAGE)))
    tier.close()
    eventually(lambda: threads() <= threads_before and num_files() <= files_before)


# --- the quota ------------------------------------------------------------------------------------


def test_a_great_many_images_are_listed_and_swept(mount: Path) -> None:
    """The least lately used go first, until the rest is within the quota; a pinned pack stays."""
    folder, number, size = Folder(mount, 1), effort(20_000, 100_000), 10
    folder.check()
    root = "0123456789abcdef"
    made = []
    for first in range(0, number, MOST_BLOCKS):
        held = range(first, min(first + MOST_BLOCKS, number))
        made.append(pack_name(root, list(held), [size] * len(held)))
    (mount / "quire-1" / root).mkdir()
    now = time.time()
    for at, name in enumerate(made):
        path = mount / "quire-1" / name
        path.write_bytes(bytes(packed_bytes(name)))
        os.utime(path, (now - 10_000 + at,) * 2)
    folder.touch(made[0], now + 3600)
    index = PackIndex()
    index.end_listing(folder.names())
    assert len(index) == number and index.total_bytes == number * size
    quota = number * size // 2
    deleted = sweep(folder, index, quota)
    left = set(folder.names())
    assert index.total_bytes == number * size - deleted <= quota
    assert index.total_bytes > 0.8 * quota and left == set(index.packs())
    assert left == {made[0], *made[len(made) - len(left) + 1 :]}
    assert sweep(folder, index, quota) == 0


def test_pins_take_half_of_the_quota_at_most(mount: Path) -> None:
    """Else a tenant that pins much would keep all others out; the longest pins stay."""
    folder, index, now = Folder(mount, 1), PackIndex(), time.time()
    folder.check()
    pinned, plain = (
        [pack_name("0" * 16, [first + at], [10]) for at in range(8)] for first in (0, 8)
    )
    for name in (*pinned, *plain):
        folder.write(name, bytes(10))
    for at, name in enumerate(pinned):
        folder.touch(name, now + 1000 + at)
    index.end_listing(folder.names())
    assert sweep(folder, index, quota=100) == 70
    assert set(pinned[3:]) <= set(index.packs()) == set(folder.names())
    assert not set(pinned[:3]) & set(index.packs())
    assert sweep(folder, index, quota=100) == 0


def test_two_listings_at_once_forget_nothing(mount: Path) -> None:
    """A pack that is written while one is under way stays, though another begins after it."""
    name, entered, go_on = pack_name("0" * 16, [1], [1]), threading.Event(), threading.Event()

    class Slow(Folder):
        def names(self) -> Iterator[str]:
            found = list(super().names())
            if not entered.is_set():  # the first one
                entered.set()
                assert go_on.wait(PATIENCE_S)
            yield from found

    folder, index = Slow(mount, 1), PackIndex()
    folder.check()
    lister = keeper.Keeper(folder, index, refresh=60.0, quota=None)
    first, second = (threading.Thread(target=lister.list) for _ in range(2))
    first.start()
    assert entered.wait(PATIENCE_S)
    folder.write(name, b"x")
    index.add(name)
    second.start()
    second.join(0.1)
    go_on.set()
    first.join()
    second.join()
    assert index.packs() == [name]


def test_over_its_quota_an_archive_is_swept_and_takes_again(
    mount: Path, open_tier: OpenTier
) -> None:
    quota = 30 * (VALUE_BYTES - 100_000 + IMAGE)
    tier = open_tier(f"file://{mount}?quota={quota}&refresh=0.1", IMAGE)
    for salt in range(5):
        names, images = chain(10, salt), filled(10, IMAGE, seed=salt)
        eventually(lambda: all(tier.write(names, images)), "it is not swept")  # noqa: B023
        assert sum(path.stat().st_size for path in packs(mount)) <= quota
    found = empty(10, IMAGE)
    assert all(tier.read(names, found)) and same(found, images, IMAGE)


def test_one_machine_sweeps(mount: Path) -> None:
    first, second = (
        keeper.Keeper(Folder(mount, 1), PackIndex(), refresh=60.0, quota=1) for _ in range(2)
    )
    Folder(mount, 1).check()
    assert first._is_the_sweeper() and first._is_the_sweeper()
    assert not second._is_the_sweeper()
    (mount / "quire-1" / keeper.NOTE).write_text("{nonsense")
    assert second._is_the_sweeper() and not first._is_the_sweeper()
    (mount / "quire-1" / keeper.NOTE).write_text('{"id": "gone", "until": 0}')
    assert first._is_the_sweeper()
    (mount / "quire-1" / keeper.NOTE).write_text("[" * 1024)
    assert second._is_the_sweeper()


def test_what_a_dead_writer_left_is_removed(mount: Path) -> None:
    folder = Folder(mount, 1)
    folder.check()
    folder.write(f"{'0' * 16}/AAAA", b"whole")
    old, new = (mount / "quire-1" / ("0" * 16) / f".aside-{at}" for at in range(2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    folder.tidy()
    assert not old.exists() and new.exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file://host/folder", "names a folder of this machine"),
        ("file:///", "names a folder of this machine"),
        ("file:///mnt/kv?quota=much", "quota=much is no size"),
        ("file:///mnt/kv?qouta=1", "did you mean quota"),
    ],
)
def test_a_wrong_url_is_refused(url: str, says: str, open_tier: OpenTier) -> None:
    with pytest.raises(ConfigError, match=says):
        open_tier(url)
