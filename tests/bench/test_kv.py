"""`quire bench kv` on the demo model: a row for each tier, restored prompts from where they are."""

from __future__ import annotations

import json

import pytest
from tiny_llm import write_config

from quire.api.cli import main


def bench(capsys, *flags):
    code = main(["bench", "kv", "--device", "cpu", "--repeat", "1", *flags, "--json", "-"])
    captured = capsys.readouterr()
    return code, captured


def test_a_prompt_restored_from_host_memory(capsys):
    code, captured = bench(
        capsys,
        *("--workload", "restore", "--lengths", "64", "--num-blocks", "40"),
        *("--host-cache-bytes", "64MiB", "--dtype", "float32"),
    )
    assert code == 0
    [row] = json.loads(captured.out)["rows"]
    assert row["from"] == "host 48" and row["tokens in"] == 64
    assert row["tier ms"]["median"] > 0
    assert captured.err.startswith("Loading smollm2, the built-in model: ")
    assert "  loading weights: 513 MiB in float32 on cpu\n" in captured.err
    assert "  restore: 0 of 1 runs" in captured.err and "  restore: 1 of 1 runs" in captured.err


def tiny(folder):
    return ["--model", str(write_config(folder / "tiny")), "--load-format", "dummy"]


def test_bandwidth_of_host_memory_and_a_disk(capsys, tmp_path):
    flags = ["--workload", "bandwidth", "--ssd-cache-dir", str(tmp_path), *tiny(tmp_path)]
    code, captured = bench(capsys, *flags)
    assert code == 0
    rows = json.loads(captured.out)["rows"]
    assert {row["tier"] for row in rows} == {"host", "host, by layer", "ssd"}
    assert all(row["GB/s"]["median"] > 0 for row in rows)
    for what in ("to host", "from host", "disk"):
        assert f"  {what}: 1 of 1 runs" in captured.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workload", "restore", "--num-blocks", "40", "--lengths", "64"], "needs a lower tier"),
        (["--workload", "bandwidth", "--ssd-cache-dir", "/no/such/folder"], "is no folder"),
    ],
)
def test_what_is_missing_is_said(capsys, tmp_path, flags, says):
    code, captured = bench(capsys, *flags, *tiny(tmp_path))
    assert code != 0 and says in captured.err and "Traceback" not in captured.err
