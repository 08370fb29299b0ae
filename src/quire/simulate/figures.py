"""The figures of a run: hits by tier, latencies, GPU hours."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from quire.simulate.fleet import Fleet
from quire.simulate.replica import Answered

PLACES = ("device", "host", "ssd", "remote")
HOUR = 3600.0


def figures(fleet: Fleet, answered: list[Answered]) -> dict[str, Any]:
    """Everything as plain numbers; times in seconds."""
    num_in = sum(each.num_in for each in answered)
    num_out = sum(each.num_out for each in answered)
    cached: Counter[str] = Counter()
    for each in answered:
        cached.update(each.cached)
    seconds = max((each.ended for each in answered), default=0.0)
    runners = [replica.runner for replica in fleet.replicas]
    busy = sum(runner.busy for runner in runners)
    return {
        "requests": len(answered),
        "refused": fleet.num_refused,
        "prompt_tokens": num_in,
        "output_tokens": num_out,
        "hit_tokens": {place: cached[place] for place in PLACES},
        "seconds": seconds,
        "first_token": _percentiles([each.first - each.arrived for each in answered]),
        "end_to_end": _percentiles([each.ended - each.arrived for each in answered]),
        "output_tokens_per_s": num_out / seconds if seconds else 0.0,
        "gpu_hours": busy / HOUR,
        "gpu_hours_of_prompts": sum(runner.prompts for runner in runners) / HOUR,
        "gpu_hours_there": len(runners) * seconds / HOUR,
        "steps": sum(replica.engine.commit.num_steps for replica in fleet.replicas),
        "preemptions": sum(r.engine.scheduler.queues.num_preemptions for r in fleet.replicas),
    }


def _percentiles(seconds: list[float]) -> list[float]:
    """From the 0th to the 100th."""
    if not seconds:
        return []
    found: list[float] = np.percentile(seconds, range(101)).tolist()
    return found


def shown(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    share = {
        place: 100 * num / found["prompt_tokens"] for place, num in found["hit_tokens"].items()
    }
    first = found["first_token"]
    return {
        "routing + tiers": name,
        **{f"{place} %": share[place] for place in PLACES},
        "hits %": sum(share.values()),
        "first token p50 ms": 1e3 * first[50],
        "p90 ms": 1e3 * first[90],
        "p99 ms": 1e3 * first[99],
        "tokens/s out": found["output_tokens_per_s"],
        "busy %": 100 * found["gpu_hours"] / found["gpu_hours_there"],
        "GPU hours": found["gpu_hours"],
        "of prompts": found["gpu_hours_of_prompts"],
    }
