"""`quire bench`: the benchmarks of `quire.bench`, each imported when it is called."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from quire.api.cli.engine import add_engine_arguments, engine_settings
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser
from quire.config import EngineConfig

ALL_SETTINGS = frozenset(spec.name for spec in fields(EngineConfig))


@dataclass(frozen=True)
class Benchmark:
    module: str  # below quire.bench; it has `add_arguments(parser)` and `run(args, settings)`
    line: str
    on_a_model: bool = False  # it takes MODEL and all of the engine's flags
    settings: frozenset[str] = frozenset()  # of the engine, where it takes only some


BENCHMARKS = {
    "throughput": Benchmark(
        "engine.throughput", "tokens per second over a batch of requests", on_a_model=True
    ),
    "latency": Benchmark(
        "engine.latency",
        "time of one request: a stream's tokens, a fresh prompt, a cached one",
        on_a_model=True,
    ),
    "decode": Benchmark(
        "engine.decode",
        "processor time of a decode step on a CPU, beside transformers",
        on_a_model=True,
    ),
    "serve": Benchmark(
        "serve", "a server under load: latencies, throughput, goodput; any with OpenAI's API"
    ),
    "attention": Benchmark(
        "kernels.attention",
        "attention alone over scattered blocks, against the machine's rates",
        settings=frozenset({"device", "dtype", "block_size"}),
    ),
    "experts": Benchmark(
        "kernels.experts",
        "a layer's experts alone in each format, against the machine's rates",
        settings=frozenset({"device", "dtype"}),
    ),
    "embed": Benchmark(
        "engine.embed",
        "texts a second that become embeddings, beside sentence-transformers",
        on_a_model=True,
    ),
    "adapters": Benchmark(
        "engine.adapters", "LoRA adapters: what they cost, in turns with none", on_a_model=True
    ),
    "structured": Benchmark(
        "engine.structured",
        "output held to a schema: whether it is valid, and what it costs",
        on_a_model=True,
    ),
    "speculation": Benchmark(
        "engine.speculation",
        "speculative decoding: what it gains, and that it costs nothing elsewhere",
        on_a_model=True,
    ),
    "kv": Benchmark(
        "kv.command",
        "the tiers below the device: restored prompts, bandwidth, hit rates on a trace",
        on_a_model=True,
    ),
    "replicas": Benchmark(
        "engine.replicas",
        "conversations over several replicas: what each way of routing computes",
        on_a_model=True,
    ),
    "index": Benchmark(
        "kv.index", "time of allocator and prefix index, and the waste of each block size"
    ),
}

EXAMPLES = """examples:
  quire bench throughput --workload cpu --compare transformers
  quire bench throughput qwen3-0.6b --load-format dummy --workload nano --profile traces
  quire bench latency --workload prefill --lengths 128,512
  quire bench serve --rate 4 --num-requests 200 --slo-ttft 200
  quire bench attention --json attention.json
  quire bench embed BAAI/bge-small-en-v1.5 --compare sentence-transformers
  quire bench adapters --workload cpu --adapters 4
  quire bench kv --trace requests.jsonl --capacity 3000
  quire bench replicas --remote-cache-url redis://localhost:6379
  quire bench index

Each BENCHMARK has a --help of its own, with its workloads, its flags and more examples.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        line = benchmark.line
        kinds.add_parser(
            name,
            help=line,
            description=f"{line[0].upper()}{line[1:]}.",
            fill=partial(_add_benchmark_arguments, benchmark),
        )


def _add_benchmark_arguments(benchmark: Benchmark, parser: CommandParser) -> None:
    _module(benchmark).add_arguments(parser)
    if benchmark.on_a_model:
        add_engine_arguments(parser)
    elif benchmark.settings:
        add_flags(parser, EngineConfig, "engine settings", skip=ALL_SETTINGS - benchmark.settings)


def run(args: argparse.Namespace) -> int:
    benchmark = BENCHMARKS[args.benchmark]
    return int(_module(benchmark).run(args, _settings(benchmark, args)))


def _module(benchmark: Benchmark) -> ModuleType:
    return import_module(f"quire.bench.{benchmark.module}")


def _settings(benchmark: Benchmark, args: argparse.Namespace) -> dict[str, Any]:
    if benchmark.on_a_model:
        return engine_settings(args)
    settings = given(EngineConfig, args) if benchmark.settings else {}
    EngineConfig.create(**settings)
    return settings
