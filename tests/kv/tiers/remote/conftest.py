"""Servers for the tests of the remote tier, and a proxy before one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE
from faulty_remotes import (
    FaultyBucket,
    FaultyMount,
    FaultyRedis,
    FaultyRemote,
    FaultySharedCache,
)
from patience import PATIENCE_S, eventually
from redis_server import RedisServer
from remote_blocks import IMAGE_BYTES
from tcp_proxy import TcpProxy

from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.tier import Tier


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """A folder for an archive."""
    (tmp_path / "mount").mkdir()
    return tmp_path / "mount"


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[TcpProxy]:
    proxy = TcpProxy(server.port)
    yield proxy
    proxy.vanish()


@pytest.fixture(params=["redis", "file", "s3", "shared"])
def remote(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyRemote]:
    """Each kind of store that the fault tests run over."""
    kinds: dict[str, Callable[[], FaultyRemote]] = {
        "redis": lambda: FaultyRedis(tmp_path),
        "file": lambda: FaultyMount(tmp_path, monkeypatch),
        "s3": lambda: FaultyBucket(tmp_path),
        "shared": lambda: FaultySharedCache(tmp_path),
    }
    remote = kinds[request.param]()
    yield remote
    remote.close()


@pytest.fixture
def open_tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tier]]:
    """Opens tiers whose patience, where the URL does not say it, is the tests'."""
    monkeypatch.setattr("quire.kv.tiers.remote.open.DEFAULT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("quire.kv.tiers.remote.guard._FIRST_S", PATIENCE_S)
    tiers = []

    def open_tier(url: str, image_bytes: int = IMAGE_BYTES) -> Tier:
        tiers.append(open_remote(url, image_bytes, BLOCK_SIZE))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Until the breaker is in a state."""

    def wait_for(tier: Tier, state: str) -> None:
        eventually(lambda: tier.stats()["breaker"] == state, f"the breaker is not {state}")

    return wait_for
