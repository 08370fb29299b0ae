"""`quire bench index`: what a block costs in the allocator and the prefix index."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.bench.options import add_run_flags, count
from quire.bench.report.progress import runs_bar
from quire.bench.report.table import Row, check_json_path, show, table, write_json
from quire.errors import ConfigError
from quire.kv.index import Node
from quire.kv.prefix import PrefixCache

LENGTHS = [1, 16, 50, 100, 500, 1000, 4000]
BLOCK_SIZES = [8, 16, 32, 64, 128, 256]

EXAMPLES = """examples:
  quire bench index
  quire bench index --tokens 32768 --block-size 32 --repeat 3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--tokens", type=count, default=131_072, metavar="N", help="prompt length")
    parser.add_argument("--block-size", type=count, default=16, metavar="N")
    add_run_flags(parser, repeat=7)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    if args.tokens < args.block_size:
        raise ConfigError(f"--tokens {args.tokens} fill no block; give at least --block-size.")
    operations = measure(args.tokens, args.block_size, args.repeat)
    waste = internal_waste()
    parts = [
        f"a prompt of {args.tokens:,} tokens in blocks of {args.block_size}",
        table(operations),
        "empty slots held by a sequence, in % of its slots, by length and block size",
        table(waste),
    ]
    show(parts, args.json)
    write_json(args.json, {"operations": operations, "waste": waste})
    return 0


def measure(num_tokens: int, block_size: int, repeat: int) -> list[Row]:
    """Each operation on a prompt's worth of blocks; the median over `repeat` fresh caches."""
    runs = []
    with runs_bar("index", repeat) as bar:
        for _ in range(repeat):
            runs.append(_one_run(num_tokens, block_size))
            bar.update()
    blocks = num_tokens // block_size
    rows = []
    for name in runs[0]:
        seconds = statistics.median(run[name] for run in runs)
        rows.append(
            {"operation": name, "ms": 1e3 * seconds, "µs per block": 1e6 * seconds / blocks}
        )
    return rows


def _one_run(num_tokens: int, block_size: int) -> dict[str, float]:
    count = num_tokens // block_size
    cache = PrefixCache(count, block_size)
    tokens = np.random.default_rng(0).integers(0, 150_000, num_tokens, dtype=np.int32)
    chain: list[Node] = []
    blocks: list[int] = []

    return {
        "allocate": _seconds(lambda: blocks.extend(cache.allocator.allocate(count))),
        "publish": _seconds(lambda: cache.publish("", chain, tokens, blocks)),
        "free (kept as cached)": _seconds(lambda: cache.allocator.release(blocks[::-1])),
        "match, cold": _seconds(lambda: cache.match("", tokens, [], num_tokens)),
        "match, known, one block more": _seconds(
            lambda: cache.match("", tokens, chain[:-1], num_tokens)
        ),
        "share": _seconds(lambda: cache.allocator.share(blocks)),
        "free again": _seconds(lambda: cache.allocator.release(blocks[::-1])),
        "allocate by eviction": _seconds(lambda: cache.allocator.allocate(count)),
    }


def _seconds(operation: Callable[[], object]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def internal_waste() -> list[Row]:
    return [
        {"tokens": length}
        | {f"{size}": 100 * (1 - length / (-(-length // size) * size)) for size in BLOCK_SIZES}
        for length in LENGTHS
    ]
