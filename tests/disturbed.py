"""Engines that something happens to between their steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch


def before_each_step(engine: Any, disturb: Callable[[Any], None], every: int = 1) -> None:
    step, number = engine.step, count(1)

    def disturbed() -> Any:
        if next(number) % every == 0:
            disturb(engine)
        return step()

    engine.step = disturbed


def poison_free_blocks(engine: Any) -> None:
    """Fill free blocks with NaN, so that a kernel that reads one shows it."""
    free = list(engine.scheduler.cache.allocator._free)
    cache = engine.runner.cache
    for layer, places in enumerate(cache.layout.places):
        for number in range(len(places)):
            values, _ = cache.stream(layer, number)
            values[free] = torch.nan


def preempt(engine: Any) -> None:
    if running := engine.scheduler.running:
        engine.scheduler.queues.preempt(running[-1])
