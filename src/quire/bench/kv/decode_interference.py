"""Requests that decode while blocks move: how much slower are they than when nothing moves?

The two are measured in turns, a stretch of steps each, so that a machine that warms up or has
other guests treats both alike.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.engine.workloads import random_prompt
from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.kv.store import KVStore
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.bench.engine.session import Session

REQUESTS, TOKENS_IN = 32, 512
FEWEST_PAIRS = 7
STRETCH_S = {"cuda": 0.35, "cpu": 2.0}
WAIT_S = 60.0
MOVING_BYTES = 2 << 30  # moved at once, by one put and one load


def run_decode_interference(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    engine = session.llm.engine
    tiering, store = session.tiering("interference")
    pairs = max(FEWEST_PAIRS, args.repeat)
    session.check_room(2 * TOKENS_IN, "raise it")
    names = [f"interference-{i}" for i in range(REQUESTS)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    allocator = tiering.cache.allocator
    try:
        for seed, name in enumerate(names):
            engine.add_request(name, random_prompt(TOKENS_IN, seed), params)
        for _ in range(4):
            engine.step()
        steps = _steps_in(engine, STRETCH_S[session.device.type])
        most = max(1, MOVING_BYTES // store.host.image_bytes)
        count = min(most, allocator.num_available // 4, store.host.capacity or most)
        mover = Mover(store, allocator.allocate(2 * count))
        quiet, busy, moved = [], [], 0
        with runs_bar("interference", pairs) as bar:
            for _ in range(pairs):
                quiet.append(_seconds(engine, steps))
                with mover.moving():
                    busy.append(_seconds(engine, steps))
                moved += mover.bytes_moved
                bar.update()
        allocator.release(mover.blocks)
    finally:
        for name in names:
            engine.abort_request(name)
    ratio = Sample(b / q for b, q in zip(busy, quiet, strict=True))
    row = {
        "requests": REQUESTS,
        "steps": steps,
        "ms a step": Sample(quiet).map(lambda s: 1e3 * s / steps),
        "while blocks move": Sample(busy).map(lambda s: 1e3 * s / steps),
        "times as long": ratio,
        "GB moved": moved / 1e9,
        "GB/s": moved / sum(busy) / 1e9,
    }
    return {"rows": [row], "notes": ["blocks move in both directions at once, without a pause"]}


class Mover:
    """Puts new blocks and loads them again, as fast as the store takes them."""

    def __init__(self, store: KVStore, blocks: list[int]) -> None:
        self.store = store
        self.blocks = blocks
        self.bytes_moved = 0
        self._first_token = 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Meanwhile blocks move; the first are on their way before anything else happens."""
        self.bytes_moved = 0
        started, stop = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._move, args=(started, stop))
        thread.start()
        started.wait(WAIT_S)
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _move(self, started: threading.Event, stop: threading.Event) -> None:
        half = len(self.blocks) // 2
        there = self._new_prompt(half)
        self.store.put(there, self.blocks[:half]).wait(WAIT_S)
        image_bytes = self.store.host.image_bytes
        while not stop.is_set():
            new = self._new_prompt(half)
            put = self.store.put(new, self.blocks[:half])
            load = self.store.match(there).load(self.blocks[half:])
            started.set()
            put.wait(WAIT_S)
            load.wait(WAIT_S)
            self.bytes_moved += (half + load.num_loaded) * image_bytes
            there = new
        started.set()

    def _new_prompt(self, blocks: int) -> Any:
        tokens = blocks * self.store.namespace.block_size
        self._first_token += tokens
        return np.arange(self._first_token, self._first_token + tokens, dtype=np.int32)


def _seconds(engine: Any, steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return time.perf_counter() - started


def _steps_in(engine: Any, seconds: float) -> int:
    return max(4, round(8 * seconds / _seconds(engine, 8)))
