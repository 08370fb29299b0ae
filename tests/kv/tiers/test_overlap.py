"""Checksums cost no time of the disk: while one block has its turn, others are under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from block_images import BLOCK_SIZE, chain, empty, filled

from quire.kv.tiers.ssd import reading, writing
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.io_engine import Ended, IoEngine, IoQueue, Transfer
from quire.kv.tiers.ssd.tier import SsdTier

IMAGE_BYTES = 200_000
BLOCKS = 40


class Watched(IoEngine):
    """Another engine, with a count of the transfers that are under way."""

    def __init__(self, engine: IoEngine) -> None:
        self.name, self.depth = engine.name, engine.depth
        self.under_way = 0
        self._engine = engine

    def queue(self) -> IoQueue:
        return _WatchedQueue(self, self._engine.queue())

    def close(self) -> None:
        self._engine.close()


class _WatchedQueue(IoQueue):
    def __init__(self, engine: Watched, queue: IoQueue) -> None:
        self._engine, self._queue = engine, queue

    def start(self, transfer: Transfer) -> None:
        self._engine.under_way += 1
        self._queue.start(transfer)

    def wait(self) -> list[Ended]:
        ended = self._queue.wait()
        self._engine.under_way -= len(ended)
        return ended


def test_the_disk_has_work_while_blocks_are_summed(
    tmp_path: Path, engine_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(choose_engine(engine_name))
    seen: dict[str, list[int]] = {"header": [], "examine": []}

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def watched(*arguments: Any) -> Any:
            seen[name].append(engine.under_way)
            return real(*arguments)

        monkeypatch.setattr(module, name, watched)

    watch(writing, "header")
    watch(reading, "examine")
    quota = Geometry(IMAGE_BYTES, BLOCK_SIZE).quota_for(BLOCKS)
    tier = SsdTier([tmp_path], quota, IMAGE_BYTES, BLOCK_SIZE, engine=engine)
    assert all(tier.write(chain(BLOCKS), filled(BLOCKS, IMAGE_BYTES)))
    assert all(tier.read(chain(BLOCKS), empty(BLOCKS, IMAGE_BYTES)))
    tier.close()
    # The first block of a write is summed before there is anything to do; from then on the window
    # fills up. The last blocks of a read are summed when nothing is left to read.
    assert seen["header"] == [*range(engine.depth), *seen["header"][engine.depth :]]
    assert seen["examine"][: BLOCKS - 2 * engine.depth] == [engine.depth] * (
        BLOCKS - 2 * engine.depth
    )
