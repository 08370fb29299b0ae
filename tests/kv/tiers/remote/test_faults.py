"""A store that fails, or the way to it: right answers, bounded waits, and it heals by itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from block_images import chain, empty, filled, keys, same
from faulty_remotes import FaultyRemote
from patience import PATIENCE_S, eventually
from redis_server import RedisServer
from remote_blocks import IMAGE_BYTES

from quire.kv.tiers.tier import Tier

OpenTier = Callable[..., Tier]
WaitFor = Callable[..., None]

TIMEOUT = 0.3
COUNT = 6

NAMES, IMAGES = chain(COUNT), filled(COUNT, IMAGE_BYTES)


def timed(call: Callable[..., list[bool]], *args: object) -> list[bool]:
    """Without a bound of its own, a call over a network that fails would not end at all."""
    started = time.monotonic()
    answer = call(*args)
    assert time.monotonic() - started < PATIENCE_S
    return answer


def write_all(tier: Tier) -> None:
    """A busy machine may miss so short a deadline now and then."""
    eventually(lambda: all(tier.write(NAMES, IMAGES)))


def check_reads(tier: Tier) -> list[bool]:
    """What is said to be whole is right, byte for byte."""
    found = empty(COUNT, IMAGE_BYTES)
    whole = timed(tier.read, NAMES, found)
    got = [at for at, good in enumerate(whole) if good]
    assert same([found[at] for at in got], [IMAGES[at] for at in got], IMAGE_BYTES)
    return whole


@pytest.mark.parametrize("mode", ["black hole", "reset", "trickle", "cut"])
def test_the_network_fails_and_heals(
    remote: FaultyRemote, open_tier: OpenTier, wait_for: WaitFor, mode: str
) -> None:
    tier = open_tier(remote.url(TIMEOUT))
    write_all(tier)
    remote.fail(mode, 2 * IMAGE_BYTES)
    for _ in range(8):
        whole = check_reads(tier)
        assert not all(whole)
        timed(tier.contains, keys(NAMES))
        if tier.stats()["breaker"] == "open":
            break
    wait_for(tier, "open")
    started = time.monotonic()
    for _ in range(100):
        if tier.stats()["breaker"] == "open":
            assert tier.contains(keys(NAMES)) == [False] * COUNT
            assert tier.write(NAMES, IMAGES) == [False] * COUNT
    assert time.monotonic() - started < PATIENCE_S
    told = tier.stats()
    # Three calls in a row, or one and the attempt to connect that follows it.
    assert told["timeouts"] + told["errors"] >= 2 and told["drops"]["open"] >= COUNT
    remote.fail("pass")
    wait_for(tier, "closed")
    eventually(lambda: all(check_reads(tier)))
    eventually(lambda: all(tier.contains(keys(NAMES))))


def test_what_arrived_before_the_cut_is_used(remote: FaultyRemote, open_tier: OpenTier) -> None:
    """A server that dies in the middle of a get: whole blocks are whole, the rest is missed."""
    if not remote.comes_in_pieces:
        pytest.skip("the blocks of a call come together")
    tier = open_tier(remote.url(TIMEOUT))
    write_all(tier)
    remote.fail("cut", 3 * IMAGE_BYTES)
    whole = check_reads(tier)
    assert 1 <= sum(whole) <= 3 and whole == sorted(whole, reverse=True)
    assert tier.counters.drops["error"] == COUNT - sum(whole)


def test_corruption_on_the_way_is_never_served(
    remote: FaultyRemote, open_tier: OpenTier, wait_for: WaitFor
) -> None:
    tier = open_tier(remote.url(TIMEOUT))
    write_all(tier)
    remote.fail("corrupt")
    for _ in range(4):
        assert not any(check_reads(tier))
    remote.fail("pass")
    wait_for(tier, "closed")
    time.sleep(0.05)
    write_all(tier)
    eventually(lambda: all(check_reads(tier)))


def test_down_at_the_start(remote: FaultyRemote, open_tier: OpenTier, wait_for: WaitFor) -> None:
    remote.vanish()
    started = time.monotonic()
    tier = open_tier(remote.url(TIMEOUT))
    assert tier.contains(keys(NAMES)) == [False] * COUNT
    assert time.monotonic() - started < PATIENCE_S
    assert tier.stats()["breaker"] == "open"
    remote.come_back()
    wait_for(tier, "closed")
    write_all(tier)
    eventually(lambda: all(check_reads(tier)))


@pytest.mark.parametrize("mode", ["black hole", "trickle", "reset"])
def test_silent_at_the_start(
    remote: FaultyRemote, open_tier: OpenTier, wait_for: WaitFor, mode: str
) -> None:
    """It accepts the connection, and then says nothing, or too slowly, or no."""
    remote.fail(mode)
    started = time.monotonic()
    tier = open_tier(remote.url(TIMEOUT))
    assert tier.contains(keys(NAMES)) == [False] * COUNT
    assert time.monotonic() - started < PATIENCE_S
    remote.fail("pass")
    wait_for(tier, "closed")
    write_all(tier)


def test_killed_and_started_again(
    remote: FaultyRemote, open_tier: OpenTier, wait_for: WaitFor
) -> None:
    tier = open_tier(remote.direct_url(TIMEOUT))
    for _ in range(2):
        write_all(tier)
        eventually(lambda: all(check_reads(tier)))
        remote.kill()
        assert not any(check_reads(tier))
        wait_for(tier, "open")
        remote.start()
        wait_for(tier, "closed")
        if not remote.survives_kill:
            assert not any(check_reads(tier))  # it has forgotten, which is no fault
    remote.kill()
    remote.start()  # so quickly that the tier did not notice: at most a call is lost by it
    if not remote.survives_kill:
        assert not all(check_reads(tier))
    wait_for(tier, "closed")
    write_all(tier)


def test_a_server_that_stops_for_a_while(
    remote: FaultyRemote, open_tier: OpenTier, wait_for: WaitFor
) -> None:
    tier = open_tier(remote.direct_url(TIMEOUT))
    write_all(tier)
    remote.pause()
    while tier.stats()["breaker"] == "closed":
        assert not any(check_reads(tier))
    remote.resume()
    wait_for(tier, "closed")
    eventually(lambda: all(check_reads(tier)))


def test_a_connection_that_hangs_does_not_hold_up_the_others(
    remote: FaultyRemote, open_tier: OpenTier
) -> None:
    tier = open_tier(remote.url(timeout=6))
    write_all(tier)
    remote.hang_next_call()
    with ThreadPoolExecutor(1) as other:
        hanging = other.submit(tier.read, NAMES, empty(COUNT, IMAGE_BYTES))
        time.sleep(0.1)
        for _ in range(5):
            eventually(lambda: all(check_reads(tier)))
            assert tier.contains(keys(NAMES)) == [True] * COUNT
        assert not hanging.done()
        assert hanging.result() == [False] * COUNT
    assert tier.stats()["breaker"] == "closed"


def test_a_loading_server_is_not_there_yet(
    server: RedisServer, open_tier: OpenTier, wait_for: WaitFor
) -> None:
    """It greets, but answers no question."""
    server.plain.config_set("requirepass", "changed")
    tier = open_tier(f"{server.url}?timeout={TIMEOUT}")
    assert tier.stats()["breaker"] == "open" and "NOAUTH" in tier.stats()["last_error"]
    assert tier.contains(keys(NAMES)) == [False] * COUNT


def test_threads_and_sockets_do_not_leak(
    server: RedisServer, open_tier: OpenTier, wait_for: WaitFor
) -> None:
    def held() -> tuple[int, int]:
        threads = [t for t in threading.enumerate() if t.name.startswith("quire-remote")]
        sockets = server.plain.info("clients")["connected_clients"]
        return len(threads), sockets

    before = held()
    tier = open_tier(f"{server.url}?timeout={TIMEOUT}")
    for _ in range(3):
        tier.write(NAMES, IMAGES)
        server.plain.client_kill_filter(_type="normal", skipme=True)
        check_reads(tier)
        wait_for(tier, "closed")
    tier.contains(keys(NAMES))
    eventually(lambda: held()[0] <= before[0] + 1 and held()[1] <= before[1] + 4)
    tier.close()
    eventually(lambda: held()[0] <= before[0] and held()[1] <= before[1])


@pytest.mark.parametrize("mode", ["pass", "black hole", "trickle"])
def test_to_close_takes_no_time(remote: FaultyRemote, open_tier: OpenTier, mode: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    remote.fail(mode)
    tier = open_tier(remote.url(timeout=0.5))
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < PATIENCE_S
    eventually(lambda: "quire-remote-keeper" not in [t.name for t in threading.enumerate()])
    remote.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 1)
