"""`python -m quire.simulate.check`: the simulator beside a real engine on this machine.

Rates are fitted to steps that are timed first; then the engine answers a trace, each request when
it is due, and the simulator the same trace by those rates. Nothing is fitted to the run itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from quire.api.llm import LLM
from quire.bench.options import count
from quire.bench.report.sample import Sample
from quire.bench.report.table import table
from quire.engine.engine import Engine
from quire.models.config import ModelConfig
from quire.models.source import open_model
from quire.params import SamplingParams
from quire.simulate.calibrate import fit, timed_steps
from quire.simulate.costs import StepCosts
from quire.simulate.fleet import Fleet, Setup
from quire.simulate.machine import Machine
from quire.simulate.trace import Trace, random_trace

GUESS = Machine(
    memory=1e9, weights=1e10, matrix=2e10, kv=1e10, attention=1e10, step=1e-3, overlap=False
)
ITEMSIZE = 4  # bytes: float32
RATIOS = ("tokens/s, simulated / real", "p50, simulated / real", "mean, simulated / real")


class Figures(NamedTuple):
    speed: float  # tokens a second
    median: float  # seconds to the first token
    mean: float


def run_real(engine: Engine, trace: Trace, clock: Callable[[], float]) -> Figures:
    """Answer a trace, each request from the moment it is due."""
    waiting = list(trace.replay())
    begun = clock()
    due: dict[str, float] = {}
    first: dict[str, float] = {}
    num_out = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].at <= clock() - begun:
            arrival = waiting.pop(0)
            name = str(len(due))
            due[name] = arrival.at
            params = SamplingParams(max_tokens=arrival.num_out, ignore_eos=True)
            ids = arrival.token_ids() % engine.model.vocab_size
            engine.add_request(name, ids, params, stream=True)
            num_out += arrival.num_out
        if engine.has_unfinished_requests():
            for request in engine.advance():
                first.setdefault(request.id, clock() - begun)
    seconds = clock() - begun
    return _figures([first[name] - due[name] for name in due], num_out, seconds)


def run_simulated(trace: Trace, config: ModelConfig, machine: Machine, engine: Engine) -> Figures:
    scheduler = engine.scheduler
    setup = Setup(
        num_replicas=1,
        num_blocks=scheduler.cache.num_blocks,
        block_size=scheduler.cache.block_size,
        max_num_batched_tokens=scheduler.max_budget,
        max_num_seqs=scheduler.max_num_seqs,
        router="random",
    )
    answered = Fleet(setup, StepCosts(config, machine, ITEMSIZE)).run(trace.replay())
    first = [each.first - each.arrived for each in answered]
    num_out = sum(each.num_out for each in answered)
    return _figures(first, num_out, max(each.ended for each in answered))


def _figures(first: list[float], num_out: int, seconds: float) -> Figures:
    return Figures(num_out / seconds, statistics.median(first), statistics.fmean(first))


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.cpu_time:
        torch.set_num_threads(1)
    config = open_model(args.model, args.load_format, progress=False).config
    with LLM(
        args.model,
        load_format=args.load_format,
        num_blocks=args.num_blocks,
        device="cpu",
        dtype="float32",
        use_tqdm=False,
    ) as llm:
        rows = [_compare(args, seed, llm.engine, config, clock) for seed in range(args.repeat)]
    print(table(rows))
    for name in RATIOS:
        found = Sample(row[name] for row in rows)
        print(f"{name}: median {found.median:.3f} ({min(found.runs):.3f} to {max(found.runs):.3f})")
    return 0


def _compare(
    args: argparse.Namespace,
    seed: int,
    engine: Engine,
    config: ModelConfig,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Time steps, answer a trace, simulate it; all anew, for the machine may have changed."""
    machine = fit(timed_steps(engine, clock), config, GUESS, ITEMSIZE)
    if args.write_rates is not None:
        Path(args.write_rates).write_text(json.dumps(vars(machine), indent=1) + "\n")
    trace = random_trace(args.num_requests, args.rate, seed)
    engine.scheduler.cache.clear()
    real = run_real(engine, trace, clock)
    found = run_simulated(trace, config, machine, engine)
    return {
        "tokens/s": real.speed,
        "simulated": found.speed,
        RATIOS[0]: found.speed / real.speed,
        "first token p50 ms": 1e3 * real.median,
        "simulated p50": 1e3 * found.median,
        RATIOS[1]: found.median / real.median,
        "first token mean ms": 1e3 * real.mean,
        "simulated mean": 1e3 * found.mean,
        RATIOS[2]: found.mean / real.mean,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m quire.simulate.check", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--num-blocks", type=count, default=2048)
    parser.add_argument("--num-requests", type=count, default=40)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--repeat", type=count, default=3)
    parser.add_argument("--write-rates", metavar="FILE", help="for quire simulate --rates")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and the clock is the time it had a core: where others use the machine",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
