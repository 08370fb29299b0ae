"""`quire bench`: the benchmarks of `quire.bench`, each imported when it is called."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module

from quire.api.cli.engine import add_engine_arguments, engine_settings
from quire.api.cli.parser import CommandParser

BENCHMARKS = {
    "throughput": "tokens per second over a batch of requests",
    "index": "time of allocator and prefix index, and the waste of each block size",
}

ON_A_MODEL = {"throughput"}  # these take MODEL and the engine's flags

EXAMPLES = """examples:
  quire bench throughput --workload cpu --compare transformers
  quire bench throughput --workload prefix
  quire bench index
"""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, line in BENCHMARKS.items():
        kinds.add_parser(
            name,
            help=line,
            description=f"{line[0].upper()}{line[1:]}.",
            fill=partial(_add_benchmark_arguments, name),
        )


def _add_benchmark_arguments(name: str, parser: CommandParser) -> None:
    import_module(f"quire.bench.{name}").add_arguments(parser)
    if name in ON_A_MODEL:
        add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = engine_settings(args) if args.benchmark in ON_A_MODEL else {}
    return int(import_module(f"quire.bench.{args.benchmark}").run(args, settings))
