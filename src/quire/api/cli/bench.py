"""`quire bench`: the benchmarks of `quire.bench`, each imported when it is called."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from quire.api.cli.engine import add_engine_arguments, engine_settings
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser
from quire.config import EngineConfig

BENCHMARKS = {
    "throughput": "tokens per second over a batch of requests",
    "latency": "time of one request: a stream's tokens, a fresh prompt, a cached one",
    "serve": "a server under load: latencies, throughput, goodput; any with OpenAI's API",
    "attention": "attention alone over scattered blocks, against the machine's rates",
    "structured": "output held to a schema: whether it is valid, and what it costs",
    "speculation": "tokens guessed ahead: what that gains, and that it costs nothing elsewhere",
    "kv": "the tiers below the device: restored prompts, bandwidth, hit rates on a trace",
    "replicas": "conversations over several replicas: what each way of routing computes",
    "index": "time of allocator and prefix index, and the waste of each block size",
}

ROOMS = {
    "throughput": "engine.throughput",
    "latency": "engine.latency",
    "serve": "serve",
    "attention": "kernels.attention",
    "structured": "engine.structured",
    "speculation": "engine.speculation",
    "kv": "kv.command",
    "replicas": "engine.replicas",
    "index": "kv.index",
}  # below quire.bench

# These take MODEL and all of the engine's flags.
ON_A_MODEL = {"throughput", "latency", "structured", "speculation", "kv", "replicas"}
SETTINGS = {"attention": {"device", "dtype", "block_size"}}  # these take only some

EXAMPLES = """examples:
  quire bench throughput --workload cpu --compare transformers
  quire bench throughput qwen3-0.6b --load-format dummy --workload nano --profile traces
  quire bench latency --workload prefill --lengths 128,512
  quire bench serve --rate 4 --num-requests 200 --slo-ttft 200
  quire bench attention --json attention.json
  quire bench kv --trace requests.jsonl --capacity 3000
  quire bench replicas --remote-cache-url redis://localhost:6379
  quire bench index

Each BENCHMARK has a --help of its own, with its workloads, its flags and more examples.
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
    _module(name).add_arguments(parser)
    if name in ON_A_MODEL:
        add_engine_arguments(parser)
    elif name in SETTINGS:
        others = {spec.name for spec in fields(EngineConfig)} - SETTINGS[name]
        add_flags(parser, EngineConfig, "engine settings", skip=others)


def run(args: argparse.Namespace) -> int:
    return int(_module(args.benchmark).run(args, _settings(args)))


def _module(name: str) -> ModuleType:
    """The benchmark's own, which has its flags and runs it."""
    return import_module(f"quire.bench.{ROOMS[name]}")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    if args.benchmark in ON_A_MODEL:
        return engine_settings(args)
    settings = given(EngineConfig, args) if args.benchmark in SETTINGS else {}
    EngineConfig.create(**settings)
    return settings
