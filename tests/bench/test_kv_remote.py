"""The remote tier's benchmark, on blocks that take a moment: what it tells, not how fast it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis_server import RedisServer

from quire.bench.kv import remote_bandwidth
from quire.bench.report.table import table
from quire.errors import QuireError


def test_bandwidth_beside_a_plain_client(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    rows = remote_bandwidth.bandwidth(server.url, image_bytes=50_000, blocks=5, repeat=3)
    left = server.plain.dbsize()
    server.kill()
    assert [row["way"] for row in rows] == ["read", "write"]
    for row in rows:
        assert len(row["share of plain"].runs) == 3
        assert row["GB/s"].median > 0 and row["plain GB/s"].median > 0
    assert "share of plain" in table(rows) and left == 0


def test_a_store_that_is_not_there_is_told() -> None:
    with pytest.raises(QuireError, match="Connection refused"):
        remote_bandwidth.bandwidth("redis://127.0.0.1:1/0", image_bytes=50_000, blocks=2)
