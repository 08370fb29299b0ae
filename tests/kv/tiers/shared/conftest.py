"""A server of a shared cache, and engines' tiers over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE
from patience import PATIENCE_S
from shared_cache import IMAGE_BYTES, settings

from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.shared.server import CacheServer
from quire.kv.tiers.tier import Tier


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., CacheServer]]:
    servers = []

    def make(host_blocks: int = 32, image_bytes: int = IMAGE_BYTES) -> CacheServer:
        made = CacheServer(tmp_path / "socket", settings(tmp_path, image_bytes, host_blocks))
        servers.append(made)
        return made

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server: Callable[..., CacheServer]) -> CacheServer:
    return make_server()


@pytest.fixture
def open_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tier]]:
    monkeypatch.setattr("quire.kv.tiers.remote.guard._FIRST_S", PATIENCE_S)
    tiers = []

    def open_tier(image_bytes: int | tuple[int, ...] = IMAGE_BYTES) -> Tier:
        url = f"quire://{tmp_path}/socket?timeout={PATIENCE_S}"
        tiers.append(open_remote(url, image_bytes, BLOCK_SIZE))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()
