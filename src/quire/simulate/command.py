"""The steps of `quire simulate`: a trace on a fleet, row by row."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from quire.bench.report.picture import check_plot_path
from quire.bench.report.progress import runs_bar
from quire.bench.report.table import check_json_path, publish
from quire.errors import ConfigError
from quire.models.source import open_model
from quire.simulate.costs import StepCosts
from quire.simulate.figures import figures, shown
from quire.simulate.fleet import Fleet, Setup
from quire.simulate.machine import GPUS, Machine, read_rates
from quire.simulate.rows import Row, read_rows
from quire.simulate.trace import Arrival, Trace, read_trace

MEMORY_SHARE = 0.9  # of the device's memory, as `gpu_memory_utilization`
FOR_STEPS = 4 << 30  # bytes of it that the largest step takes


def run(args: argparse.Namespace) -> int:
    check_json_path(args.json)
    check_plot_path(args.plot)
    rows = read_rows(args.rows)
    machine = GPUS[args.gpu] if args.rates is None else read_rates(args.rates, GPUS[args.gpu])
    costs = StepCosts(open_model(args.model, "dummy", progress=False).config, machine)
    num_blocks = args.num_blocks or device_blocks(costs, args.block_size)
    trace = read_trace(args.trace, args.num_requests)
    results = []
    with runs_bar("simulate", len(rows) * args.copies * len(trace), unit="request") as bar:
        for row in rows:
            results.append(_simulate(row, trace, costs, num_blocks, args, bar))
    publish(_report(args, machine, trace, num_blocks, results), args.json)
    if args.plot is not None:
        from quire.simulate.plot import draw

        draw(args.plot, results, _says(args, trace))
    return 0


def _simulate(
    row: Row, trace: Trace, costs: StepCosts, num_blocks: int, args: argparse.Namespace, bar: Any
) -> dict[str, Any]:
    block_bytes = args.block_size * costs.token_bytes
    tiers = {tier: getattr(args, f"{tier}_cache_bytes") // block_bytes for tier in row.tiers}
    setup = Setup(
        num_replicas=args.replicas,
        num_blocks=num_blocks,
        block_size=args.block_size,
        policy=row.policy,
        router=row.router,
        seed=args.seed,
        **tiers,
    )
    started, cpu = time.perf_counter(), time.process_time()
    fleet = Fleet(setup, costs)
    arrivals = trace.replay(args.copies, args.speed, args.seed)
    answered = fleet.run(_watched(arrivals, bar))
    if not answered:
        raise ConfigError(
            f"Every request is longer than the pool of {num_blocks * args.block_size:,} tokens; "
            "raise --num-blocks."
        )
    took = {"took": time.perf_counter() - started, "took_cpu": time.process_time() - cpu}
    return {"row": row.name, **took, **figures(fleet, answered)}


def _watched(arrivals: Iterator[Arrival], bar: Any) -> Iterator[Arrival]:
    for arrival in arrivals:
        yield arrival
        bar.update(1)


def device_blocks(costs: StepCosts, block_size: int) -> int:
    """How many blocks the device has room for, beside the weights and the largest step."""
    room = MEMORY_SHARE * costs.machine.memory - costs.weight_bytes - FOR_STEPS
    blocks = int(room // (block_size * costs.token_bytes))
    if blocks < 2:
        raise ConfigError("The model does not fit into that GPU; give a smaller --model.")
    return blocks


def _report(
    args: argparse.Namespace,
    machine: Machine,
    trace: Trace,
    num_blocks: int,
    results: list[dict[str, Any]],
) -> dict[str, Any]:
    took, cpu = (sum(result[name] for result in results) for name in ("took", "took_cpu"))
    refused = max(result["refused"] for result in results)
    notes = [
        "% of prompt tokens that were found, by where; GPU hours are those in which a step ran",
        f"simulated in {took:,.0f} s, {cpu:,.0f} s of a core",
    ]
    if refused:
        notes.insert(0, f"{refused:,} requests were refused: they are longer than the pool")
    return {
        "says": _says(args, trace),
        "on": f"{args.replicas:,} × {args.model} on {args.gpu}, {num_blocks:,} blocks of "
        f"{args.block_size} tokens each",
        "machine": vars(machine),
        "settings": {k: v for k, v in vars(args).items() if k not in ("command", "json", "plot")},
        "results": results,
        "rows": [shown(result["row"], result) for result in results],
        "notes": notes,
    }


def _says(args: argparse.Namespace, trace: Trace) -> str:
    seconds = trace.arrivals[-1].at / args.speed
    copies = f"{args.copies} copies of " if args.copies > 1 else ""
    num = args.copies * len(trace)
    return (
        f"{copies}{args.trace}, {args.speed:g} times as fast: {num:,} requests in {seconds:,.0f} s"
    )
