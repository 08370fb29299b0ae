"""A pack with something wrong in it: whoever meets it mends it, and nobody meets it twice."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from archive_packs import packs
from block_images import chain, empty, filled, keys, same
from patience import PATIENCE_S, eventually
from s3_server import S3Server

from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.archive.folder import Folder
from quire.kv.tiers.remote.archive.objects import Bytes
from quire.kv.tiers.remote.archive.open import open_objects
from quire.kv.tiers.remote.archive.pack import Span, packed_bytes
from quire.kv.tiers.tier import Tier

IMAGE = 5_000
OpenTier = Callable[..., Tier]


def flip(path: Path, at: int) -> None:
    """One byte of a file becomes another."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("number", range(4))
def test_a_damaged_pack_is_mended_by_whoever_meets_it(
    mount: Path, open_tier: OpenTier, number: int
) -> None:
    """However many engines come: at the next put all is there, and stays."""
    names, images = chain(10, number), filled(10, IMAGE)
    url = f"file://{mount}"
    open_tier(url, IMAGE).write(names, images)
    [pack] = packs(mount)
    flip(pack, len(pack.read_bytes()) // 2 + 500)
    os.utime(pack, (until := time.time() + 1000, until))  # it is pinned
    first = open_tier(url, IMAGE)
    assert sum(first.read(names, empty(10, IMAGE))) == 9
    first.close()
    eventually(lambda: not pack.exists())
    [mended] = packs(mount)
    assert mended.name != pack.name and abs(mended.stat().st_mtime - until) < 1
    second = open_tier(url, IMAGE)
    assert second.contains(keys(names)).count(False) == 1
    assert all(second.write(names, images)) and len(packs(mount)) == 2
    for _ in range(3):
        found, reader = empty(10, IMAGE), open_tier(url, IMAGE)
        assert all(reader.read(names, found)) and same(found, images, IMAGE)
        assert not reader.counters.drops


def test_engines_that_repaired_beside_a_damaged_pack_lose_it_too(
    mount: Path, open_tier: OpenTier
) -> None:
    """As engines did before packs were mended: the same block, right and wrong, in two packs."""
    names, images = chain(10), filled(10, IMAGE)
    url = f"file://{mount}?refresh=0.1"
    tier = open_tier(url, IMAGE)
    tier.write(names[5:6], images[5:6])
    [right] = packs(mount)
    kept = right.read_bytes()
    right.unlink()
    eventually(lambda: not any(tier.contains(keys(names))))
    tier.write(names, images)
    [pack] = packs(mount)
    flip(pack, len(pack.read_bytes()) // 2 + 500)
    right.write_bytes(kept)
    reader = open_tier(url, IMAGE)  # which may look into either of the two first
    is_met = not all(reader.read(names, empty(10, IMAGE)))
    reader.close()
    eventually(lambda: pack.exists() != is_met)
    found = empty(10, IMAGE)
    assert all(open_tier(url, IMAGE).read(names, found)) and same(found, images, IMAGE)


def test_two_machines_that_mend_at_once_lose_nothing_more(mount: Path, open_tier: OpenTier) -> None:
    names, images = chain(10), filled(10, IMAGE)
    url = f"file://{mount}"
    open_tier(url, IMAGE).write(names, images)
    [pack] = packs(mount)
    flip(pack, 500)
    flip(pack, len(pack.read_bytes()) - 500)
    one, other = open_tier(url, IMAGE), open_tier(url, IMAGE)
    # Each meets one of the two that are wrong.
    readers = [
        threading.Thread(target=one.read, args=(names[:5], empty(5, IMAGE))),
        threading.Thread(target=other.read, args=(names[5:], empty(5, IMAGE))),
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(PATIENCE_S)
    one.close()
    other.close()
    eventually(lambda: not pack.exists())

    def read() -> list[bool]:
        """What is left to mend is met again."""
        return open_tier(url, IMAGE).read(names, empty(10, IMAGE))

    eventually(lambda: read() == [False, *[True] * 8, False])


def test_a_truncated_pack_is_mended(mount: Path, open_tier: OpenTier) -> None:
    names, images = chain(10), filled(10, IMAGE)
    url = f"file://{mount}"
    open_tier(url, IMAGE).write(names, images)
    [pack] = packs(mount)
    os.truncate(pack, len(pack.read_bytes()) // 2)
    reader = open_tier(url, IMAGE)
    assert reader.read(names[7:8], empty(1, IMAGE)) == [False]
    reader.close()
    eventually(lambda: not pack.exists())
    tier, found = open_tier(url, IMAGE), empty(10, IMAGE)
    assert tier.contains(keys(names)) == [True] * 5 + [False] * 5
    assert all(tier.write(names, images))
    assert all(tier.read(names, found)) and same(found, images, IMAGE)


def test_a_pack_of_a_bucket_is_mended(tmp_path: Path, open_tier: OpenTier) -> None:
    server = S3Server(tmp_path)
    try:
        names, images = chain(10), filled(10, IMAGE)
        tier = open_tier(server.url(), IMAGE)
        # One request may fail on a busy machine: what was not kept comes again.
        eventually(lambda: all(tier.write(names, images)), "not all was kept")
        bucket = open_objects(Address.parse(server.url()), PATIENCE_S)
        pack = max(bucket.names(), key=packed_bytes)
        size = packed_bytes(pack)
        [data] = bucket.read(pack, [Span(0, size)])
        wrong = bytearray(data)
        wrong[size // 2 + 500] ^= 1
        bucket.write(pack, wrong)
        reader = open_tier(server.url(), IMAGE)
        eventually(lambda: all(reader.contains(keys(names))))
        assert sum(reader.read(names, empty(10, IMAGE))) == 9
        reader.close()
        eventually(lambda: pack not in set(bucket.names()))
        other, found = open_tier(server.url(), IMAGE), empty(10, IMAGE)
        eventually(lambda: other.contains(keys(names)).count(False) == 1)
        eventually(lambda: all(other.write(names, images)))
        assert all(other.read(names, found)) and same(found, images, IMAGE)
    finally:
        server.kill()


def test_who_reads_a_pack_while_it_is_mended_misses_nothing(
    mount: Path, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may break off a reply that has begun when its object is deleted."""
    names, images = chain(10), filled(10, IMAGE)
    tier = open_tier(f"file://{mount}", IMAGE)
    tier.write(names, images)
    [pack] = packs(mount)
    flip(pack, len(pack.read_bytes()) // 2 + 500)
    begun, read = threading.Event(), Folder.read

    def broken_off(self: Folder, name: str, spans: Sequence[Span]) -> Iterator[Bytes]:
        if len(spans) == 1 and name.endswith(pack.name):
            begun.set()
            eventually(lambda: not pack.exists())
            raise OSError("the reply was broken off")
        if len(spans) == 9:  # what is right, to be put into a new pack
            assert begun.wait(PATIENCE_S)
        yield from read(self, name, spans)

    monkeypatch.setattr(Folder, "read", broken_off)
    assert sum(tier.read(names, empty(10, IMAGE))) == 9
    found = empty(1, IMAGE)
    assert tier.read(names[:1], found) == [True] and same(found, images[:1], IMAGE)
