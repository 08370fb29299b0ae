"""The vLLM connector with several KV groups: what is lost cannot be computed, so it is no hit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from plain_vllm import BLOCK, Engine, Request

from quire.connectors.vllm import hits
from quire.kv.tiers.ssd.geometry import DATA_FILE

WINDOW = 6
PROMPT = list(range(100, 100 + 8 * BLOCK + 1))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(hits, "FETCH_S", PATIENCE_S)
    ssd = {"ssd_cache_dir": str(tmp_path / "ssd"), "ssd_cache_bytes": "8MiB"}
    engine = Engine(tmp_path, windows=(None, WINDOW), **ssd)
    yield engine
    engine.close()


def leave_on_disk(engine: Engine) -> None:
    assert engine.worker.store.flush(PATIENCE_S)
    assert engine.worker.store.host.clear()


def check_loaded(engine: Engine, computed: list[list[int]], loaded: list[list[int]]) -> None:
    """All of the full group, and what the window sees: the last two blocks."""
    assert torch.equal(engine.values(loaded[0][:8]), engine.values(computed[0][:8]))
    seen = slice(6, 8)
    assert torch.equal(engine.values(loaded[1][seen], 1), engine.values(computed[1][seen], 1))
    assert not engine.failed


def test_what_each_group_needs_is_loaded(engine: Engine) -> None:
    computed = engine.compute(Request("a", PROMPT))
    before = engine.values(list(range(64)), 1)
    loaded = engine.load(Request("b", PROMPT))
    check_loaded(engine, computed, loaded)
    assert torch.equal(engine.values(loaded[1][:6], 1), before[:, loaded[1][:6]])


def test_behind_what_vllm_has(engine: Engine) -> None:
    computed = engine.compute(Request("a", PROMPT))
    loaded = engine.load(Request("b", PROMPT), computed=7 * BLOCK)
    for group in range(2):
        last = engine.values(loaded[group][7:8], group)
        assert torch.equal(last, engine.values(computed[group][7:8], group))


def test_a_prompt_that_ends_sooner_lacks_its_window(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT))
    assert engine.find(Request("b", PROMPT[: 4 * BLOCK + 1])) == 0


def test_images_of_a_disk_are_verified_before_they_are_a_hit(engine: Engine) -> None:
    computed = engine.compute(Request("a", PROMPT))
    leave_on_disk(engine)
    check_loaded(engine, computed, engine.load(Request("b", PROMPT)))


def test_images_that_are_corrupt_are_no_hit(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.compute(Request("a", PROMPT))
    leave_on_disk(engine)
    for file in (tmp_path / "ssd").rglob(DATA_FILE):
        with open(file, "r+b") as data:
            data.write(os.urandom(file.stat().st_size))
    monkeypatch.setattr(hits, "FETCH_S", 0.2)  # nothing comes, however long it is waited for
    assert engine.find(Request("b", PROMPT)) == 0
    assert not engine.failed and not engine.worker.store.host.stats()["held"]
