"""The tiers that the contract tests run over. To have a new kind tested, add a line to `KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S
from remote_harness import BucketHarness, MooncakeHarness, MountHarness, RedisHarness
from shared_cache import SharedCacheHarness
from tier_harness import Harness, SsdHarness

from quire.kv.tiers.ssd.choose_engine import choose_engine

KINDS: dict[str, Callable[[Path], Harness]] = {
    "ssd, io_uring": lambda folder: SsdHarness(folder, "io_uring"),
    "ssd, threads": lambda folder: SsdHarness(folder, "threads"),
    "redis": lambda folder: RedisHarness("tcp"),
    "redis, socket file": lambda folder: RedisHarness("socket"),
    "redis, TLS": lambda folder: RedisHarness("tls"),
    "redis, cluster": lambda folder: RedisHarness("cluster"),
    "file": MountHarness,
    "file, zstd": lambda folder: MountHarness(folder, "?compress=zstd"),
    "s3": lambda folder: BucketHarness(),
    "mooncake": lambda folder: MooncakeHarness(),
    "shared by a server": SharedCacheHarness,
}


def has_io_uring() -> bool:
    try:
        choose_engine("io_uring").close()
    except OSError:
        return False
    return True


@pytest.fixture(params=KINDS)
def harness(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Harness]:
    monkeypatch.setattr("quire.kv.tiers.remote.guard._FIRST_S", PATIENCE_S)  # the machine is busy
    if "io_uring" in request.param and not has_io_uring():
        pytest.skip("this kernel has no io_uring, or forbids it")
    made = KINDS[request.param](tmp_path)
    yield made
    made.clean_up()


@pytest.fixture(params=["io_uring", "threads"])
def engine_name(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and not has_io_uring():
        pytest.skip("this kernel has no io_uring, or forbids it")
    return str(request.param)
