"""Several engines, one cache: what one of them writes another reads, and none harms another."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, keys, same
from patience import eventually
from shared_cache import IMAGE_BYTES, settings
from tier_harness import flip

from quire.errors import ConfigError
from quire.kv.image import NO_TENANT
from quire.kv.keys import group_name
from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.shared import settings as settings_module
from quire.kv.tiers.shared.server import CacheServer
from quire.kv.tiers.ssd.geometry import DATA_FILE, Geometry
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import Tier

OpenTier = Callable[..., Tier]
MakeServer = Callable[..., CacheServer]

COUNT = 6
NAMES, IMAGES = chain(COUNT), filled(COUNT, IMAGE_BYTES)


def read(tier: Tier) -> list[bool]:
    """What is said to be whole is right."""
    found = empty(COUNT, IMAGE_BYTES)
    whole = tier.read(NAMES, found)
    got = [at for at, good in enumerate(whole) if good]
    assert same([found[at] for at in got], [IMAGES[at] for at in got], IMAGE_BYTES)
    return whole


def exchanges() -> int:
    """How often the memory of a connection is mapped in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:quire-exchange")


def test_what_one_engine_writes_another_reads(server: CacheServer, open_tier: OpenTier) -> None:
    first, second = open_tier(), open_tier()
    assert first.write(NAMES, IMAGES) == [True] * COUNT
    assert second.contains(keys(NAMES)) == [True] * COUNT
    assert all(read(second))
    assert server.stats()["host"]["used"] == COUNT
    eventually(lambda: server.stats()["ssd"]["used"] == COUNT)
    eventually(lambda: server.stats()["host"]["held"] == 0)


def test_from_disk_when_memory_has_no_room(make_server: MakeServer, open_tier: OpenTier) -> None:
    server = make_server(host_blocks=2)
    tier = open_tier()
    assert tier.write(NAMES, IMAGES) == [True] * COUNT
    assert all(read(tier))
    told = server.stats()
    assert told["host"]["used"] == 2 and told["ssd"]["reads"]["blocks"] >= COUNT - 2


def test_a_new_server_has_what_the_last_one_wrote(
    make_server: MakeServer, open_tier: OpenTier
) -> None:
    """The engine goes on: without the server, and with it again."""
    server, tier = make_server(), open_tier()
    tier.write(NAMES, IMAGES)
    server.close()
    assert read(tier) == tier.contains(keys(NAMES)) == [False] * COUNT
    make_server()
    eventually(lambda: all(read(tier)))


def test_corruption_on_disk_is_a_miss(
    make_server: MakeServer, open_tier: OpenTier, tmp_path: Path
) -> None:
    server = make_server(host_blocks=0)
    tier = open_tier()
    tier.write(NAMES[:1], IMAGES[:1])
    flip(tmp_path / "kv" / DATA_FILE, Geometry(IMAGE_BYTES, BLOCK_SIZE).head_bytes + 777)
    assert tier.contains(keys(NAMES[:1])) == [True]
    assert not any(read(tier))
    assert server.stats()["ssd"]["drops"] == {"corrupt": 1}
    assert tier.contains(keys(NAMES[:1])) == [False]


def test_a_use_is_told_to_the_server(make_server: MakeServer, open_tier: OpenTier) -> None:
    """Of two blocks in a pool of two, the one that is asked for stays when a third comes."""
    server, tier = make_server(host_blocks=2), open_tier()
    old, used, new = (chain(1, salt=salt)[0] for salt in range(3))
    tier.write([used], IMAGES[:1])
    tier.write([old], IMAGES[:1])
    for _ in range(3):
        tier.use([used.key])
    tier.use([new.key])
    tier.use([new.key])
    eventually(lambda: server.stats()["host"]["held"] == 0)  # what is being written stays
    tier.write([new], IMAGES[:1])
    assert server._cache is not None
    assert server._cache.host.contains([used.key, old.key, new.key]) == [True, False, True]


def test_groups_have_their_sizes(make_server: MakeServer, open_tier: OpenTier) -> None:
    """And a server that is started again learns them from the first engine that comes."""
    sizes = (IMAGE_BYTES, 9_000)
    server, tier = make_server(), open_tier(sizes)
    names = [group_name(name, group) for name in NAMES[:2] for group in range(2)]
    assert tier.write(names, IMAGES[:4]) == [True] * 4
    tier.close()
    server.close()
    make_server()
    found = empty(4, IMAGE_BYTES)
    assert open_tier(sizes).read(names, found) == [True] * 4
    for name, image, expected in zip(names, found, IMAGES, strict=False):
        assert image[: sizes[name.group]] == expected[: sizes[name.group]]


def test_an_engine_with_other_blocks_is_told_why(server: CacheServer, open_tier: OpenTier) -> None:
    tier, other = open_tier(), open_tier(2 * IMAGE_BYTES)
    tier.write(NAMES, IMAGES)
    assert other.contains(keys(NAMES)) == [False] * COUNT
    told = other.stats()
    assert told["breaker"] == "open" and "start another server" in told["last_error"]
    assert all(read(tier))  # and the folder was not emptied for it


def test_a_folder_made_for_other_blocks_is_not_emptied(
    make_server: MakeServer, open_tier: OpenTier
) -> None:
    server, tier = make_server(), open_tier()
    tier.write(NAMES, IMAGES)
    server.close()
    make_server()
    assert open_tier(2 * IMAGE_BYTES).stats()["breaker"] == "open"
    eventually(lambda: all(read(tier)))


def test_only_its_user_can_open_the_socket(server: CacheServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    server.close()
    assert not server.path.exists()


def test_one_server_a_socket(server: CacheServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Another server serves at"):
        CacheServer(server.path, settings(tmp_path / "other", IMAGE_BYTES))


def test_a_socket_that_a_kill_left_is_replaced(tmp_path: Path, make_server: MakeServer) -> None:
    first = make_server()
    os.link(first.path, tmp_path / "left")
    first.close()
    os.rename(tmp_path / "left", first.path)
    make_server()


def test_a_folder_in_use_is_told_at_the_start(
    make_server: MakeServer, open_tier: OpenTier, tmp_path: Path
) -> None:
    make_server()
    open_tier()
    with pytest.raises(ConfigError, match="is in use by a running engine"):
        CacheServer(tmp_path / "second", settings(tmp_path, IMAGE_BYTES))
    assert not (tmp_path / "second").exists()


def test_a_folder_is_not_left_open_when_memory_cannot_be_had(
    make_server: MakeServer, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine that comes opens it."""
    make, refused = settings_module.HostMemory, []

    def scarce(*args: Any, **named: Any) -> Any:
        if not refused:
            refused.append(True)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return make(*args, **named)

    monkeypatch.setattr(settings_module, "HostMemory", scarce)
    make_server()
    tier = open_tier()
    assert refused and "Cannot allocate memory" in tier.stats()["last_error"]
    eventually(lambda: all(tier.write(NAMES, IMAGES)))


def test_a_tenants_blocks_are_deleted_under_whatever_root(
    server: CacheServer, open_tier: OpenTier
) -> None:
    """An engine that was started again does not know the salts of its requests before that."""
    tier, [other] = open_tier(), chain(1, salt=7)
    mine = [name._replace(tenant=b"m" * 16) for name in NAMES]
    assert all(tier.write([*mine, other], [*IMAGES, IMAGES[0]]))
    assert tier.delete_roots([bytes(32)], b"m" * 16) == COUNT
    assert tier.contains(keys([*mine, other])) == [False] * COUNT + [True]


def test_connections_and_their_memory_end_together(
    server: CacheServer, open_tier: OpenTier
) -> None:
    eventually(lambda: exchanges() == 0)  # those of tests before this one
    tiers = [open_tier() for _ in range(3)]
    for tier in tiers:
        tier.write(NAMES, IMAGES)
        assert all(read(tier))
    assert server.stats()["connections"] == 12 and exchanges() == 24  # both ends
    for tier in tiers:
        tier.close()
    eventually(lambda: server.stats()["connections"] == 0)
    del tiers, tier
    eventually(lambda: exchanges() == 0)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("quire://host/socket", "names the socket of `quire cache serve`"),
        ("quire://", "write quire:///path/of/the/socket"),
        ("quire:///socket?ttl=3", "unknown option 'ttl'"),
    ],
)
def test_a_url_that_makes_no_sense(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_remote(url, IMAGE_BYTES, BLOCK_SIZE)
    assert says in str(refused.value)


def test_a_disk_that_hangs_is_no_outage(
    server: CacheServer, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, may_go_on = open_tier(), threading.Event()
    write = SsdTier.write

    def hang(*args: Any) -> list[bool]:
        may_go_on.wait()
        return write(*args)

    monkeypatch.setattr(SsdTier, "write", hang)
    for salt in range(4):
        assert all(tier.write(chain(COUNT, salt), IMAGES))
    assert all(read(tier))
    assert server.stats()["ssd"]["used"] == 0
    may_go_on.set()
    eventually(lambda: server.stats()["ssd"]["used"] == 4 * COUNT)


def test_an_operator_pins_deletes_and_lists(server: CacheServer, open_tier: OpenTier) -> None:
    tier, others = open_tier(), chain(COUNT, salt=1)
    tier.write(NAMES, IMAGES)
    tier.write(others, IMAGES)
    held = {name.root[:8].hex(): COUNT for name in (NAMES[0], others[0])}
    assert tier.blocks_by_root() == held
    assert tier.pin(keys(NAMES[:2]), 100.0) == 2
    assert tier.delete(keys(NAMES[3:])) == 3
    assert tier.contains(keys(NAMES)) == [True] * 3 + [False] * 3
    assert tier.delete_roots([others[0].root], NO_TENANT) == COUNT
    assert tier.blocks_by_root() == {NAMES[0].root[:8].hex(): 3}
    server.close()
    assert tier.pin(keys(NAMES), 1.0) is tier.delete(keys(NAMES)) is tier.blocks_by_root() is None


def test_what_is_deleted_does_not_come_back_from_the_queue(
    server: CacheServer, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, write = open_tier(), SsdTier.write

    def write_late(*args: Any) -> list[bool]:
        time.sleep(0.2)
        return write(*args)

    monkeypatch.setattr(SsdTier, "write", write_late)
    assert all(tier.write(NAMES, IMAGES))
    assert tier.delete(keys(NAMES)) == COUNT
    assert tier.contains(keys(NAMES)) == [False] * COUNT
    assert server.stats()["ssd"]["used"] == 0


def test_a_folder_that_an_engine_filled_is_served_as_it_is(
    make_server: MakeServer, open_tier: OpenTier, tmp_path: Path
) -> None:
    own = settings(tmp_path, IMAGE_BYTES)
    engines = SsdTier(own.folders, own.ssd_cache_bytes, IMAGE_BYTES, BLOCK_SIZE)
    engines.write(NAMES, IMAGES)
    engines.close()
    make_server()
    assert all(read(open_tier()))
