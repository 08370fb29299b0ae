"""`quire bench kv --trace`: how much of a trace each policy would have had ready."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from quire.bench.kv.belady import count_belady_hits, find_next_uses
from quire.bench.kv.block_trace import Trace, read_trace
from quire.bench.kv.replay import count_hits
from quire.bench.report.progress import runs_bar
from quire.bench.report.table import Row, show, table, write_json_lines
from quire.kv.policy import LearnedPolicy, LRUPolicy, Policy

REQUESTS_A_MOVE = 500  # of the progress bar
NUM_REPLAYS = 3  # of each capacity


def run_trace(args: argparse.Namespace) -> int:
    trace = read_trace(args.trace)
    next_uses = find_next_uses(trace.blocks, trace)
    with runs_bar("kv", NUM_REPLAYS * len(args.capacity) * len(trace), unit="request") as bar:
        results = [_shares(trace, next_uses, capacity, bar) for capacity in args.capacity]
    most = 100 * (1 - trace.num_distinct / trace.num_blocks)
    parts = [
        f"{len(trace):,} requests for {trace.num_blocks:,} blocks, {trace.num_distinct:,} of them "
        f"distinct; with room for all {most:.1f} % would hit",
        table([_row(result) for result in results]),
        "% of all blocks that hit as part of a cached prefix; the policy is the tiers' own,\n"
        "Belady knows the future; µs are those of the replay",
    ]
    show(parts, args.json)
    write_json_lines(args.json, results)
    return 0


def _shares(trace: Trace, next_uses: Sequence[int], capacity: int, bar: Any) -> Row:
    """The same requests under each policy, from an empty tier."""
    lru, lru_us = _replay(LRUPolicy[int](capacity), trace, bar)
    learned, learned_us = _replay(LearnedPolicy[int](capacity), trace, bar)
    belady = count_belady_hits(_watched(trace, bar), next_uses, capacity)
    return {
        "capacity": capacity,
        "lru": 100 * lru / trace.num_blocks,
        "policy": 100 * learned / trace.num_blocks,
        "belady": 100 * belady / trace.num_blocks,
        "lru_us_per_block": lru_us,
        "policy_us_per_block": learned_us,
    }


def _replay(policy: Policy[int], trace: Trace, bar: Any) -> tuple[int, float]:
    """Hits, and µs for each block."""
    started = time.perf_counter()
    hits = count_hits(policy, _watched(trace, bar))
    return hits, 1e6 * (time.perf_counter() - started) / trace.num_blocks


def _watched(trace: Trace, bar: Any) -> Iterator[list[int]]:
    """All requests; the bar moves as they are taken."""
    since = 0
    for request in trace:
        yield request
        since += 1
        if since == REQUESTS_A_MOVE:
            bar.update(since)
            since = 0
    bar.update(since)


def _row(result: Row) -> Row:
    return {
        "capacity": result["capacity"],
        "LRU": result["lru"],
        "policy": result["policy"],
        "Belady": result["belady"],
        "LRU µs/block": result["lru_us_per_block"],
        "policy µs/block": result["policy_us_per_block"],
    }
