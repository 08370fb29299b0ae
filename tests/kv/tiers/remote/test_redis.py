"""The tier on a real Redis server: what it keeps there, how it asks, what it does not believe."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from block_images import chain, empty, filled, keys, same
from patience import PATIENCE_S, eventually
from redis_server import PASSWORD, QUOTED, RedisServer
from remote_blocks import IMAGE_BYTES, VALUE_BYTES, stored_key

from quire.kv.image import header
from quire.kv.tiers.tier import Tier

OpenTier = Callable[..., Tier]


def test_values_are_header_and_image_under_a_versioned_key(
    server: RedisServer, open_tier: OpenTier
) -> None:
    names, images = chain(2), filled(2, IMAGE_BYTES)
    assert open_tier(server.url).write(names, images) == [True, True]
    assert sorted(server.plain.keys()) == sorted(stored_key(name).encode() for name in names)
    for name, image in zip(names, images, strict=True):
        image = image[:IMAGE_BYTES]
        assert server.plain.get(stored_key(name)) == header(name, image) + bytes(image)


def test_a_prompts_questions_are_one_round_trip(server: RedisServer, open_tier: OpenTier) -> None:
    tier = open_tier(server.url)
    names = chain(3000)
    tier.write(names[:2], filled(2, IMAGE_BYTES))
    before = tier.stats()["round_trips"]
    packets = server.plain.info("stats")["total_reads_processed"]
    assert tier.contains(keys(names)) == [True, True] + [False] * 2998
    assert tier.stats()["round_trips"] == before + 1
    assert server.plain.info("stats")["total_reads_processed"] - packets < 100


def test_many_batches_are_one_call(server: RedisServer, open_tier: OpenTier) -> None:
    """More than one batch and more than one window."""
    size, count = 9 << 20, 5
    tier = open_tier(server.url, size)
    names, images = chain(count), filled(count, size)
    found = empty(count, size)
    assert tier.write(names, images) == [True] * count
    assert tier.read(names, found) == [True] * count
    assert same(found, images, size)


def test_what_another_replica_brought_is_not_sent_again(
    server: RedisServer, open_tier: OpenTier
) -> None:
    names, images = chain(4), filled(4, IMAGE_BYTES)
    open_tier(server.url).write(names[:3], images[:3])
    tier = open_tier(server.url)
    received = server.plain.info("stats")["total_net_input_bytes"]
    assert tier.write(names, images) == [True] * 4
    assert server.plain.info("stats")["total_net_input_bytes"] - received < 2 * VALUE_BYTES
    assert tier.stats()["writes"]["blocks"] == 1


def test_a_socket_file_and_a_database(server: RedisServer, open_tier: OpenTier) -> None:
    tier = open_tier(f"unix://{server.socket}?db=3")
    assert tier.write(chain(1), filled(1, IMAGE_BYTES)) == [True]
    assert "db3" in server.plain.info("keyspace") and server.plain.dbsize() == 0
    assert open_tier(server.url).contains(keys(chain(1))) == [False]
    assert open_tier(server.url[:-1] + "3").contains(keys(chain(1))) == [True]


def test_ttl(server: RedisServer, open_tier: OpenTier) -> None:
    tier, for_ever = open_tier(server.url + "?ttl=600"), open_tier(server.url)
    [name, other, brief] = chain(3)
    tier.write([name], filled(1, IMAGE_BYTES))
    for_ever.write([other], filled(1, IMAGE_BYTES))
    assert 0 < server.plain.pttl(stored_key(name)) <= 600_000
    assert server.plain.pttl(stored_key(other)) == -1
    open_tier(server.url + "?ttl=0.4").write([brief], filled(1, IMAGE_BYTES))
    eventually(lambda: not server.plain.exists(stored_key(brief)))
    assert tier.contains([name.key, other.key, brief.key]) == [True, True, False]


def test_questions_count_as_use_for_the_servers_eviction(
    server: RedisServer, open_tier: OpenTier
) -> None:
    tier = open_tier(server.url)
    names = chain(2)
    tier.write(names, filled(2, IMAGE_BYTES))
    time.sleep(1.1)  # the server counts in seconds
    tier.contains([names[0].key])
    asked, other = [server.plain.object("idletime", stored_key(name)) for name in names]
    assert asked < other


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda value: value[:-1], "torn"),
        (lambda value: value + b"x", "torn"),
        (lambda value: value * 30, "torn"),
        (lambda value: b"\0" * len(value), "torn"),
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), "corrupt"),
        (lambda value: value[:40] + bytes([value[40] ^ 1]) + value[41:], "foreign"),
    ],
)
def test_a_bad_value_is_missed_deleted_and_counted(
    server: RedisServer, open_tier: OpenTier, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    tier = open_tier(server.url)
    names, images = chain(3), filled(3, IMAGE_BYTES)
    tier.write(names, images)
    key = stored_key(names[2])
    server.plain.set(key, spoil(server.plain.get(key)))
    assert tier.read(names[::-1], empty(3, IMAGE_BYTES)) == [False, True, True]
    assert tier.counters.drops == {reason: 1}
    assert not server.plain.exists(key)
    assert tier.write(names, images) == [True] * 3
    assert tier.read(names, empty(3, IMAGE_BYTES)) == [True] * 3


def test_an_empty_value_is_none(server: RedisServer, open_tier: OpenTier) -> None:
    tier = open_tier(server.url)
    names, images = chain(2), filled(2, IMAGE_BYTES)
    tier.write(names, images)
    server.plain.set(stored_key(names[0]), b"")
    assert tier.contains(keys(names)) == [False, True]
    assert tier.read(names, empty(2, IMAGE_BYTES)) == [False, True]
    assert tier.write(names, images) == [True, True]
    assert tier.read(names, empty(2, IMAGE_BYTES)) == [True, True]


def test_a_key_of_another_kind_is_cleared_away(server: RedisServer, open_tier: OpenTier) -> None:
    tier = open_tier(server.url)
    [name] = chain(1)
    server.plain.lpush(stored_key(name), "x")
    assert tier.contains([name.key]) == [False]
    assert tier.read([name], empty(1, IMAGE_BYTES)) == [False]
    assert tier.counters.drops == {"torn": 1} and not server.plain.exists(stored_key(name))


def test_presence_that_has_become_a_lie_is_a_miss(server: RedisServer, open_tier: OpenTier) -> None:
    tier = open_tier(server.url)
    names, images = chain(3), filled(3, IMAGE_BYTES)
    tier.write(names, images)
    assert tier.contains(keys(names)) == [True] * 3
    server.plain.delete(stored_key(names[1]))
    found = empty(3, IMAGE_BYTES)
    assert tier.read(names, found) == [True, False, True]
    assert same(found[::2], images[::2], IMAGE_BYTES) and not any(found[1])
    server.plain.flushall()
    assert tier.contains(keys(names)) == [False] * 3
    open_tier(server.url).write(names, images)
    assert tier.read(names, found) == [True] * 3


def test_a_full_server_is_left_alone_for_a_while_and_still_read(
    server: RedisServer, open_tier: OpenTier
) -> None:
    tier = open_tier(server.url)
    names, images = chain(4), filled(4, IMAGE_BYTES)
    tier.write(names[:1], images[:1])
    server.plain.config_set("maxmemory", "1")
    server.plain.config_set("maxmemory-policy", "noeviction")
    assert tier.write(names, images) == [True, False, False, False]
    told = tier.stats()
    assert told["drops"] == {"refused": 3} and told["last_refusal"].startswith("OOM")
    sent = server.plain.info("stats")["total_net_input_bytes"]
    assert tier.write(names, images) == [False] * 4
    assert server.plain.info("stats")["total_net_input_bytes"] - sent < VALUE_BYTES
    assert tier.read(names[:1], empty(1, IMAGE_BYTES)) == [True]
    assert tier.stats()["breaker"] == "closed"
    server.plain.config_set("maxmemory", "0")
    time.sleep(1.05)
    assert tier.write(names, images) == [True] * 4


def test_eviction_is_the_servers(server: RedisServer, open_tier: OpenTier) -> None:
    server.plain.config_set(
        "maxmemory", str(server.plain.info("memory")["used_memory"] + 2_000_000)
    )
    server.plain.config_set("maxmemory-policy", "allkeys-lru")
    tier = open_tier(server.url)
    names, images = chain(60), filled(60, IMAGE_BYTES)
    assert tier.write(names, images) == [True] * 60
    there = tier.contains(keys(names))
    assert 0 < sum(there) < 40
    found = empty(60, IMAGE_BYTES)
    whole = tier.read(names, found)  # which takes memory of the server's, and so evicts some more
    assert any(whole) and not any(got and not held for got, held in zip(whole, there, strict=True))
    kept = [at for at, got in enumerate(whole) if got]
    assert same([found[at] for at in kept], [images[at] for at in kept], IMAGE_BYTES)


def test_users_that_may_not_are_told(server: RedisServer, open_tier: OpenTier) -> None:
    server.plain.execute_command("ACL SETUSER reader on >pw ~quire:* +get +strlen +client")
    tier = open_tier(f"redis://reader:pw@127.0.0.1:{server.port}/0")
    names, images = chain(2), filled(2, IMAGE_BYTES)
    open_tier(server.url).write(names, images)
    assert tier.read(names, empty(2, IMAGE_BYTES)) == [True, True]
    other = chain(1, salt=1)
    assert tier.write(other, images[:1]) == [False]
    assert "NOPERM" in tier.stats()["last_refusal"] and tier.stats()["breaker"] == "closed"


def test_tls_and_password(tmp_path: Path, open_tier: OpenTier) -> None:
    server = RedisServer(tmp_path, password=PASSWORD, tls=True)
    names, images = chain(5), filled(5, IMAGE_BYTES)
    found = empty(5, IMAGE_BYTES)
    base = f"rediss://:{QUOTED}@127.0.0.1:{server.port}/0"
    tier = open_tier(f"{base}?ssl_ca_certs={server.ca_file}&timeout=60")
    assert tier.write(names, images) == [True] * 5
    assert tier.read(names, found) == [True] * 5 and same(found, images, IMAGE_BYTES)
    stranger = open_tier(f"{base}?timeout=60")  # does not know who signed the server's certificate
    assert stranger.contains(keys(names)) == [False] * 5
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.stats()["last_error"]
    careless = open_tier(f"{base}?ssl_cert_reqs=none&timeout=60")
    assert careless.contains(keys(names)) == [True] * 5
    by_socket = open_tier(f"unix://:{QUOTED}@{server.socket}?timeout=60")
    assert by_socket.read(names, found) == [True] * 5
    server.kill()


READER = """
import sys
sys.path.insert(0, sys.argv[3])
from block_images import chain, empty, image_of, same
from quire.kv.tiers.remote.open import open_remote
size = int(sys.argv[2])
tier = open_remote(sys.argv[1], size, 16)
names, found = chain(6, salt=5), empty(6, size)
right = tier.read(names, found) == [True] * 6
right &= same(found, [image_of(name, size) for name in names], size)
tier.close()
sys.exit(0 if right else 1)
"""


def test_another_process_reads_what_this_one_wrote(
    server: RedisServer, open_tier: OpenTier
) -> None:
    from block_images import image_of

    names = chain(6, salt=5)
    open_tier(server.url).write(names, [image_of(name, IMAGE_BYTES) for name in names])
    tests = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", READER, server.url, str(IMAGE_BYTES), tests]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
