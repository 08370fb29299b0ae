"""The flags of `quire simulate`, which import nothing that takes long."""

from __future__ import annotations

import argparse
import math
from typing import Any

from quire.bench.options import checked, count
from quire.bench.report.table import STDOUT
from quire.bench.request_trace import BLOCK_TOKENS
from quire.config import size
from quire.simulate.machine import GPUS
from quire.simulate.rows import DEFAULT

EXAMPLES = """examples:
  quire simulate --trace requests.jsonl --replicas 4
  quire simulate --trace requests.jsonl --replicas 1000 --copies 3 --speed 98 --plot fleet.png
  quire simulate --trace requests.jsonl --replicas 8 --rows random,prefix,prefix+host --json
  quire simulate --trace requests.jsonl --model qwen3-0.6b --rates other-machine.json

A row is a way of routing (random, prefix) and the tiers it has: prefix+host+ssd+remote; with /lru
behind it the tiers keep what was used last, and not what their policy chooses. Each line of FILE is
a JSON object with `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`,
names of the prompt's blocks of 512 tokens.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    load = parser.add_argument_group("load")
    load.add_argument("--trace", metavar="FILE", required=True, help="requests and their times")
    load.add_argument("--num-requests", type=count, metavar="N", help="only FILE's first N")
    load.add_argument(
        "--copies", type=count, default=1, metavar="N", help="of FILE, that share nothing"
    )
    load.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="times FILE's (default: 1)"
    )
    load.add_argument("--seed", type=int, default=0, help="of what is random (default: 0)")
    _add_fleet_flags(parser.add_argument_group("fleet"))
    report = parser.add_argument_group("report")
    report.add_argument(
        "--rows", default=",".join(DEFAULT), metavar="ROW,…", help="(default: %(default)s)"
    )
    report.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STDOUT,
        help="write all figures to FILE; without FILE, or with -, to standard output",
    )
    report.add_argument("--plot", metavar="FILE", help="draw curves into FILE.png, .svg, .pdf")


def _add_fleet_flags(group: Any) -> None:
    group.add_argument("--replicas", type=count, default=1, metavar="N", help="(default: 1)")
    group.add_argument(
        "--model", default="qwen3-8b", metavar="SHAPE", help="any model (default: %(default)s)"
    )
    group.add_argument("--gpu", choices=GPUS, default="h200", help="(default: %(default)s)")
    group.add_argument("--rates", metavar="FILE", help="JSON with other rates than the GPU's")
    group.add_argument(
        "--block-size",
        type=checked(_block_size, f"a part of {BLOCK_TOKENS}, such as 128"),
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens in a block (default: %(default)s, as the trace has them)",
    )
    group.add_argument("--num-blocks", type=count, metavar="N", help="default: what the GPU holds")
    for tier, default, whose in (
        ("host", "256GiB", "each replica's host memory"),
        ("ssd", "2TiB", "each replica's disk"),
        ("remote", "64TiB", "the store that all share"),
    ):
        group.add_argument(
            f"--{tier}-cache-bytes",
            type=checked(size().accept, "a number of bytes such as 64GiB"),
            default=default,
            metavar="SIZE",
            help=f"room in {whose}, in rows that have it (default: {default})",
        )


def _block_size(text: str) -> int:
    found = int(text)
    if found < 1 or BLOCK_TOKENS % found:
        raise ValueError(text)
    return found


def _read_speed(text: str) -> float:
    found = float(text)
    if not 0 < found < math.inf:
        raise ValueError(text)
    return found


_positive = checked(_read_speed, "a number above 0")
