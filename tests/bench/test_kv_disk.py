"""The disk's benchmark, on blocks that take a moment: what it tells, not how fast it was."""

from __future__ import annotations

from pathlib import Path

from quire.bench.kv import disk_bandwidth
from quire.bench.report.table import table


def test_bandwidth_of_each_engine_beside_the_plain_rate(tmp_path: Path) -> None:
    rows = disk_bandwidth.bandwidth(tmp_path, image_bytes=50_000, blocks=4, repeat=3)
    assert {row["way"] for row in rows} == {"read", "write"}
    assert "threads" in {row["engine"] for row in rows}
    for row in rows:
        assert len(row["share of best plain"].runs) == 3
        assert row["GB/s"].median > 0 and row["plain GB/s"].median > 0
    assert "share of best plain" in table(rows)
    assert not list(tmp_path.iterdir())


def test_time_to_restart(tmp_path: Path) -> None:
    row = disk_bandwidth.restart_seconds(tmp_path, 1000, image_bytes=1000)
    assert row["blocks"] == 1000
    assert row["restart s"] > 0
