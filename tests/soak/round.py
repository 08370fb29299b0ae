"""One round: an engine is opened over what the last one left, is loaded, drained and closed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fake_model import make_engine
from faulty_disk import OneByOne
from patience import PATIENCE_S
from redis_server import RedisServer
from tcp_proxy import TcpProxy

from quire.engine.engine import Engine
from quire.kv.rates import Rates
from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import Tier
from soak.callers import Callers
from soak.checks import StepChecks, check_quiet, check_quota
from soak.faults import DiskTroubles, FlakyDisk, NetworkTroubles, StepFaults, Troubles
from soak.tally import Tally
from soak.violation import require

REMOTE_TIMEOUT_S = 0.3
LONGEST_CLOSE_S = PATIENCE_S


@dataclass
class Surroundings:
    """What outlives an engine."""

    folder: Path
    disk: FlakyDisk
    server: RedisServer
    proxy: TcpProxy


def play(
    around: Surroundings,
    seed: str,
    seconds: float,
    tally: Tally,
    on_step: Callable[[], None],
) -> None:
    dice = random.Random(seed)
    round_ = _Round(around, dice, tally, seed)
    try:
        round_.load(seconds, on_step)
        round_.drain(on_step)
        if dice.random() < 0.5:
            round_.heal()
        round_.close()
    finally:
        round_.heal()


class _Round:
    def __init__(self, around: Surroundings, dice: random.Random, tally: Tally, seed: str) -> None:
        self.dice, self.tally, self.folder = dice, tally, around.folder
        self.troubles: list[Troubles] = [
            DiskTroubles(around.disk, dice, tally),
            NetworkTroubles(around.server, around.proxy, dice, tally),
        ]
        block_size = dice.choice([4, 4, 4, 4, 8])  # another one replaces what is on disk
        image_bytes = 4 * block_size
        self.quota = Geometry(image_bytes, block_size).quota_for(dice.choice([3, 40, 150]))
        self.ssd = self._open_ssd(image_bytes, block_size)
        tiers: list[Tier] = [self.ssd] if self.ssd is not None else []
        if dice.random() < 0.8:
            url = f"redis://127.0.0.1:{around.proxy.port}/0?timeout={REMOTE_TIMEOUT_S}"
            tiers.append(open_remote(url, image_bytes, block_size))
        self.engine = self._open_engine(block_size, tiers)
        self.checks = StepChecks(self.engine, self.ssd)
        self.callers = Callers(self.engine, dice, tally, seed)
        chance = dice.choice([0.0, 0.002, 0.01])
        StepFaults(self.engine.runner, dice, tally, chance)

    def _open_ssd(self, image_bytes: int, block_size: int) -> SsdTier | None:
        kind = self.dice.choice(["one by one", "one by one", "threads", "auto", "none"])
        if kind == "none":
            return None
        engine = OneByOne() if kind == "one by one" else choose_engine(kind)
        return SsdTier([self.folder], self.quota, image_bytes, block_size, engine=engine)

    def _open_engine(self, block_size: int, tiers: list[Tier]) -> Engine:
        dice = self.dice
        engine = make_engine(
            num_blocks=dice.choice([12, 16, 24, 40]),
            block_size=block_size,
            budget=dice.choice([5, 16, 48]),
            max_seqs=dice.choice([2, 4, 8]),
            policy=dice.choice(["fcfs", "fcfs", "priority", "cache-aware"]),
            overlap=dice.random() < 0.5,
            host_slots=dice.choice([0, 4, 16, 48]),
            tiers=tiers,
        )
        # A model without arithmetic is faster than any tier; without rates, what can be is loaded.
        engine.scheduler.tiering.store.rates = Rates()
        return engine

    def load(self, seconds: float, on_step: Callable[[], None]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for each in (*self.troubles, self.callers):
                each.act()
            if self.dice.random() < 0.002:
                self.engine.scheduler.cache.clear()
            if self.dice.random() < 0.002:
                self.engine.scheduler.tiering.store.host.clear()
            if self.engine.has_unfinished_requests():
                self._step()
            on_step()

    def drain(self, on_step: Callable[[], None]) -> None:
        """The load ends; troubles may go on."""
        started = time.monotonic()
        while self.engine.has_unfinished_requests():
            self._step()
            on_step()
        check_quiet(self.engine, self.ssd)
        require(not self.callers.waiting, "Requests were never answered.")
        self.tally.longest_drain = max(self.tally.longest_drain, time.monotonic() - started)
        if self.ssd is not None:
            check_quota(self.folder, self.quota)

    def _step(self) -> None:
        self.checks.before_step()
        started = time.monotonic()
        outputs = self.engine.step()
        self.tally.longest_step = max(self.tally.longest_step, time.monotonic() - started)
        self.tally.counts["steps"] += 1
        self.checks.after_step()
        self.callers.take(outputs)

    def heal(self) -> None:
        for each in self.troubles:
            each.heal()

    def close(self) -> None:
        scheduler = self.engine.scheduler
        tally, tiering = self.tally, scheduler.tiering
        tally.counts["preemptions"] += scheduler.queues.num_preemptions
        tally.counts["tokens computed"] += self.engine.commit.num_computed_tokens
        tally.loaded.update(tiering.tokens_by_tier)
        for tier, stats in tiering.store.stats().items():
            tally.drops.update(Counter({f"{tier}: {k}": n for k, n in stats["drops"].items()}))
        started = time.monotonic()
        self.engine.close()
        took = time.monotonic() - started
        require(took < LONGEST_CLOSE_S, f"It took {took:.0f} s to close the engine.")
        if self.ssd is not None:
            check_quota(self.folder, self.quota)
        tally.counts["rounds"] += 1
