"""`quire bench structured`, on a model that takes a moment; and the schemas that it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from tiny_model import write_tiny_model

from quire.api import cli
from quire.bench.engine.random_schemas import random_schema
from quire.bench.report import machine_rates


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> list[str]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path)
    settings = "--load-format dummy --device cpu --dtype float32 --num-blocks 512"
    return ["bench", "structured", str(folder), *settings.split()]


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "CPU_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(machine_rates, "CPU_MATRIX", 64)
    machine_rates.measured_rates.cache_clear()


def test_cost(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    flags = ["--requests", "2", "--repeat", "2", "--json", str(path)]
    assert cli.main([*line, *flags]) == 0
    found = json.loads(path.read_text())
    assert [row["output"] for row in found["rows"]] == ["plain", "schema"]
    assert len(found["of plain"]["runs"]) == len(found["by CPU time"]["runs"]) == 2
    assert "of plain" in capsys.readouterr().out


def test_validity(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even of a model that has learned nothing."""
    path = tmp_path / "figures.json"
    flags = ["--workload", "validity", "--requests", "6", "--json", str(path)]
    assert cli.main([*line, *flags]) == 0
    [row] = json.loads(path.read_text())["rows"]
    assert row["schemas"] == row["valid"] == 6


def test_random_schemas_are_schemas_and_differ() -> None:
    schemas = [random_schema(seed) for seed in range(50)]
    for schema in schemas:
        Draft202012Validator.check_schema(schema)
    assert len({json.dumps(schema) for schema in schemas}) == 50
    assert random_schema(3) == schemas[3]
