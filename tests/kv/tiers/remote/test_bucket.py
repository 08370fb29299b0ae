"""A bucket of a real S3 server: its keys, its listings, and what it does not tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from block_images import chain, empty, filled, keys, same
from patience import eventually
from s3_server import S3Server

from quire.errors import ConfigError
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.archive.index import PackIndex
from quire.kv.tiers.remote.archive.keeper import sweep
from quire.kv.tiers.remote.archive.open import open_objects
from quire.kv.tiers.remote.archive.pack import pack_name
from quire.kv.tiers.tier import Tier

IMAGE = 5_000
OpenTier = Callable[..., Tier]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path)
    yield server
    server.kill()


def test_a_wrong_secret_is_told_and_not_shown(server: S3Server, open_tier: OpenTier) -> None:
    tier = open_tier(server.url().replace("se%2Fcret", "wro%2Fng"), IMAGE)
    told = tier.stats()
    assert told["breaker"] == "open" and "Forbidden" in told["last_error"]
    assert "wro/ng" not in str(told) and "wro%2Fng" not in str(told)


def test_a_bucket_that_is_not_there_is_told(server: S3Server, open_tier: OpenTier) -> None:
    tier = open_tier(server.url().replace("@bucket", "@other"), IMAGE)
    assert "NoSuchBucket" in tier.stats()["last_error"]


def test_keys_may_come_from_the_environment(
    server: S3Server, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "quire")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "se/cret+key")
    tier = open_tier("s3://" + server.url().partition("@")[2], IMAGE)
    assert all(tier.write(chain(2), filled(2, IMAGE)))


def test_another_engine_finds_blocks_and_reads_any_of_a_pack(
    server: S3Server, open_tier: OpenTier
) -> None:
    names, images = chain(40), filled(40, IMAGE)
    writer = open_tier(server.url(), IMAGE)
    # One request may fail, as has been seen on a busy machine: what was not kept comes again.
    eventually(lambda: all(writer.write(names, images)), "not all was kept")
    other = open_tier(server.url(), IMAGE)
    eventually(lambda: all(other.contains(keys(names))))
    wanted = [39, 3, 14, 15, 30]
    found = empty(5, IMAGE)
    assert all(other.read([names[at] for at in wanted], found))
    assert same(found, [images[at] for at in wanted], IMAGE)


def test_a_bucket_is_swept_oldest_first(server: S3Server) -> None:
    bucket = open_objects(Address.parse(server.url()), 60.0)
    made = [pack_name("0" * 16, [at], [1000]) for at in range(20)]
    for name in made:
        bucket.write(name, bytes(1000))
    index = PackIndex()
    index.end_listing(bucket.names())
    assert set(index.packs()) == set(made)
    assert sweep(bucket, index, 10_000) == 11_000
    assert set(bucket.names()) == set(index.packs()) == set(made[11:])


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:///prefix", "names a bucket"),
        ("s3://bucket/kv?endpiont=http://x", "did you mean endpoint"),
        ("s3://bucket/kv?compress=gzip", "may be zstd or none"),
    ],
)
def test_a_wrong_url_is_refused(url: str, says: str, open_tier: OpenTier) -> None:
    with pytest.raises(ConfigError, match=says):
        open_tier(url)
