"""The tier on a real Mooncake store, whose client blocks for minutes when it is let."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, keys, same
from mooncake_server import MooncakeMaster
from patience import PATIENCE_S, eventually
from remote_blocks import IMAGE_BYTES, VALUE_BYTES, stored_key

from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.client import Client, Value
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.mooncake.client import MooncakeClient
from quire.kv.tiers.remote.mooncake.url import setup_of
from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.remote.tier import value_shape
from quire.kv.tiers.tier import Tier

OpenTier = Callable[..., Tier]
WaitFor = Callable[..., None]
COUNT = 5
NAMES, IMAGES = chain(COUNT), filled(COUNT, IMAGE_BYTES)
LENDS = "segment=64MiB"


@pytest.fixture(scope="module")
def calm_master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    yield master
    master.kill()


@pytest.fixture(scope="module")
def client(calm_master: MooncakeMaster) -> Iterator[Client]:
    """Mooncake without the tier, to put into it what a tier never would."""
    setup = setup_of(Address.parse(f"{calm_master.url}?{LENDS}"))
    client = MooncakeClient(setup, value_shape(IMAGE_BYTES, BLOCK_SIZE), timeout=PATIENCE_S)
    client.connect()
    yield client
    client.close()


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    """One that has a hard life."""
    master = MooncakeMaster()
    yield master
    master.kill()


@contextmanager
def nobody_is_held_up(seconds: float = 30.0) -> Iterator[None]:
    """The interpreter goes on for other threads all the time."""
    over, gaps = threading.Event(), [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not over.wait(0.01):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    clock = threading.Thread(target=tick)
    clock.start()
    yield
    over.set()
    clock.join()
    assert max(gaps) < seconds


def read_back(tier: Tier) -> list[bool]:
    found = empty(COUNT, IMAGE_BYTES)
    whole = tier.read(NAMES, found)
    got = [at for at, good in enumerate(whole) if good]
    assert same([found[at] for at in got], [IMAGES[at] for at in got], IMAGE_BYTES)
    return whole


def guests() -> set[int]:
    """The processes that run Mooncake's client for this one."""
    told = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    ).stdout
    return {int(line.split()[0]) for line in told.splitlines() if "mooncake.guest" in line}


def test_one_writes_and_another_reads_by_way_of_the_metadata_server(
    calm_master: MooncakeMaster, open_tier: OpenTier
) -> None:
    before = guests()
    url = calm_master.metadata_url
    writer, reader = open_tier(f"{url}&{LENDS}"), open_tier(url)
    assert reader.contains(keys(NAMES)) == [False] * COUNT
    assert not any(read_back(reader))
    assert writer.write(NAMES, IMAGES) == [True] * COUNT
    assert reader.contains(keys(NAMES)) == [True] * COUNT
    assert read_back(reader) == [True] * COUNT and not reader.counters.drops
    writer.close()
    reader.close()
    assert guests() == before


def test_a_corrupt_value_is_missed_deleted_and_counted(
    calm_master: MooncakeMaster, client: Client, open_tier: OpenTier
) -> None:
    tier = open_tier(calm_master.url)
    tier.write(NAMES, IMAGES)
    head_bytes = VALUE_BYTES - IMAGE_BYTES
    spoilt = Value(memoryview(bytearray(head_bytes)), memoryview(bytearray(IMAGE_BYTES)))
    key = stored_key(NAMES[1])
    assert list(client.fetch([key], [spoilt], Deadline(PATIENCE_S))) == [(0, VALUE_BYTES)]
    spoilt.image[3] ^= 1
    client.delete([key], Deadline(PATIENCE_S))
    assert list(client.store([key], [spoilt], Deadline(PATIENCE_S))) == [(0, "")]
    assert read_back(tier) == [True, False, True, True, True]
    assert tier.counters.drops == {"corrupt": 1}
    assert tier.contains([NAMES[1].key]) == [False]
    assert tier.write(NAMES, IMAGES) == [True] * COUNT
    assert read_back(tier) == [True] * COUNT


@pytest.mark.parametrize("size", [IMAGE_BYTES // 2, IMAGE_BYTES * 2])
def test_a_value_of_another_length_is_torn(
    calm_master: MooncakeMaster, client: Client, open_tier: OpenTier, size: int
) -> None:
    [name] = chain(1, salt=size)
    other = open_tier(calm_master.url, size)
    other.write([name], filled(1, size))
    tier = open_tier(calm_master.url)
    assert tier.contains([name.key]) == [True]  # this store does not tell how long it is
    assert tier.read([name], empty(1, IMAGE_BYTES)) == [False]
    assert tier.counters.drops == {"torn": 1}
    assert tier.contains([name.key]) == [False]


def test_a_store_without_room_refuses(master: MooncakeMaster, open_tier: OpenTier) -> None:
    tier = open_tier(master.url)  # and no other process lends it memory
    assert tier.write(NAMES, IMAGES) == [False] * COUNT
    told = tier.stats()
    assert told["drops"] == {"refused": COUNT} and told["last_refusal"]
    assert told["breaker"] == "closed"


def test_a_master_that_stops_dies_and_comes_back(
    master: MooncakeMaster, open_tier: OpenTier, wait_for: WaitFor
) -> None:
    before = guests()
    tier = open_tier(f"{master.url}?{LENDS}&timeout=2")
    assert tier.write(NAMES, IMAGES) == [True] * COUNT
    master.pause()
    with nobody_is_held_up():
        for _ in range(4):
            assert not any(read_back(tier))
    assert tier.stats()["breaker"] != "closed" and tier.stats()["timeouts"] >= 1
    master.resume()
    wait_for(tier, "closed")
    eventually(lambda: all(read_back(tier)))
    master.kill()
    with nobody_is_held_up():
        for _ in range(4):
            assert not any(read_back(tier))
    wait_for(tier, "open")
    master.start()
    wait_for(tier, "closed")
    eventually(lambda: all(tier.write(NAMES, IMAGES)))  # once it has lent its memory again
    eventually(lambda: all(read_back(tier)))
    assert len(guests() - before) == 1


def test_a_killed_client_is_started_again(
    calm_master: MooncakeMaster, client: Client, open_tier: OpenTier
) -> None:
    others = guests()
    tier = open_tier(calm_master.url)
    [guest] = guests() - others
    assert tier.write(NAMES, IMAGES) == [True] * COUNT
    os.kill(guest, signal.SIGKILL)
    assert not any(read_back(tier))
    eventually(lambda: tier.stats()["breaker"] == "closed" and guests() - others - {guest})
    assert read_back(tier) == [True] * COUNT


def test_nobody_at_the_address(open_tier: OpenTier) -> None:
    with nobody_is_held_up():
        tier = open_tier("mooncake://127.0.0.1:1?timeout=0.4")
        assert tier.contains(keys(NAMES)) == [False] * COUNT
        assert tier.stats()["breaker"] == "open"


def test_a_master_that_accepts_and_says_nothing(calm_master: MooncakeMaster) -> None:
    """Mooncake's client would hold the interpreter here until it is killed."""
    before = guests()
    with socket.create_server(("127.0.0.1", 0)) as silent, nobody_is_held_up():
        tier = open_remote(f"mooncake://127.0.0.1:{silent.getsockname()[1]}", IMAGE_BYTES, 16)
        assert tier.contains(keys(NAMES)) == [False] * COUNT
        assert len(guests() - before) == 1
        tier.close()
        assert guests() == before
