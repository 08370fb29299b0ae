"""The tier on a cluster of three real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from block_images import chain, empty, filled, keys, same
from patience import eventually
from redis_server import RedisCluster
from remote_blocks import IMAGE_BYTES, stored_key

from quire.kv.tiers.tier import Tier

OpenTier = Callable[..., Tier]
COUNT = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture
def tier(cluster: RedisCluster, open_tier: OpenTier) -> Tier:
    for node in cluster.nodes:
        node.plain.flushall()
    return open_tier(cluster.url)


def read_all(tier: Tier, images: list[memoryview]) -> list[bool]:
    found = empty(COUNT, IMAGE_BYTES)
    whole = tier.read(chain(COUNT), found)
    kept = [at for at, got in enumerate(whole) if got]
    assert same([found[at] for at in kept], [images[at] for at in kept], IMAGE_BYTES)
    return whole


def test_blocks_are_on_all_nodes(cluster: RedisCluster, tier: Tier) -> None:
    names, images = chain(COUNT), filled(COUNT, IMAGE_BYTES)
    assert tier.write(names, images) == [True] * COUNT
    sizes = [node.plain.dbsize() for node in cluster.nodes]
    assert sum(sizes) == COUNT and all(sizes)
    before = tier.stats()["round_trips"]
    assert tier.contains(keys(names)) == [True] * COUNT
    assert tier.stats()["round_trips"] == before + 1
    assert read_all(tier, images) == [True] * COUNT


def test_a_slot_that_moves_is_found_again(cluster: RedisCluster, tier: Tier) -> None:
    names, images = chain(COUNT), filled(COUNT, IMAGE_BYTES)
    from redis.crc import key_slot

    slot = key_slot(stored_key(names[0]).encode())
    owner = 3 * slot // 16384
    target = cluster.nodes[(owner + 1) % 3].plain.execute_command("CLUSTER", "MYID")
    for node in cluster.nodes:
        node.plain.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
    tier.write(names, images)  # the block in the slot is refused, and the map asked for
    eventually(lambda: all(tier.write(names, images)))
    assert cluster.nodes[(owner + 1) % 3].plain.exists(stored_key(names[0]))
    assert read_all(tier, images) == [True] * COUNT
    assert tier.stats()["breaker"] == "closed"


def test_a_node_that_dies_and_comes_back(
    cluster: RedisCluster, tier: Tier, wait_for: Callable[..., None]
) -> None:
    images = filled(COUNT, IMAGE_BYTES)
    tier.write(chain(COUNT), images)
    cluster.nodes[1].kill()
    assert not all(read_all(tier, images))  # and does not wait for it
    wait_for(tier, "open")
    cluster.nodes[1].start()
    wait_for(tier, "closed")
    assert any(read_all(tier, images))
    assert tier.write(chain(COUNT), images) == [True] * COUNT


def test_a_node_of_a_cluster_is_no_server_by_itself(
    cluster: RedisCluster, open_tier: OpenTier
) -> None:
    tier = open_tier(cluster.url.replace("redis+cluster", "redis"))
    for _ in range(3):
        assert tier.contains(keys(chain(COUNT))) == [False] * COUNT
    assert tier.stats()["breaker"] != "closed"
    assert "redis+cluster://" in tier.stats()["last_error"]
