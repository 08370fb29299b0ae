"""`quire bench throughput`: a workload's tokens per second, beside a peer if asked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from quire.bench.report import Row, median_and_spread, table, write_json
from quire.bench.workloads import WORKLOADS, workload

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.bench.peer import TransformersPeer
    from quire.bench.timing import Timing
    from quire.runner.runner import ModelRunner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=WORKLOADS, default="cpu", help="which requests")
    parser.add_argument(
        "--compare",
        choices=["transformers"],
        help="run it beside, in turns, in the same process",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    import torch

    from quire.runner.device import choose_device, machine

    if args.workload == "prefix" and args.compare is None:
        result = caching_on_and_off(settings, args.repeats)
    else:
        result = against_peer(settings, args.workload, args.compare, args.repeats)
    device = choose_device(settings.get("device", "auto"))
    result |= {"machine": machine(device), "torch": torch.__version__}
    print(f"{result['says']}; {result['machine']}, torch {result['torch']}\n")
    print(table(result["rows"]))
    for line in result["summary"]:
        print(line)
    write_json(args.json, result)
    return 0


def against_peer(
    settings: dict[str, Any], name: str, peer_name: str | None, repeats: int
) -> dict[str, Any]:
    """Quire, and the peer in turns with it; the ratio is taken within each turn."""
    from quire.api.llm import LLM
    from quire.bench.timing import run_workload

    load = workload(name)
    with LLM(**settings, use_tqdm=False) as llm:
        peer = _peer(llm) if peer_name else None
        small = workload("stream")
        run_workload(llm, small)
        ours: list[Timing] = []
        theirs: list[float] = []
        for _ in range(repeats):
            ours.append(run_workload(llm, load))
            if peer is not None:
                theirs.append(peer.seconds(load))
        dtype = str(_runner(llm).cache.layout.dtype).removeprefix("torch.")
    rows = [_row("quire", each) for each in ours]
    rows += [
        {"engine": "transformers", "seconds": each, "output tok/s": load.output_tokens / each}
        for each in theirs
    ]
    summary = []
    if theirs:
        ratios = [his / mine.seconds for mine, his in zip(ours, theirs, strict=True)]
        summary.append(f"\nquire is {median_and_spread(ratios)} times as fast as transformers")
    return {
        "workload": name,
        "says": f"{name}: {load.says}; {settings.get('model', 'smollm2')} in {dtype}",
        "rows": rows,
        "summary": summary,
    }


def caching_on_and_off(settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """The `prefix` workload with and without the prefix cache, in turns."""
    from quire.api.llm import LLM
    from quire.bench.timing import run_workload

    load = workload("prefix")
    rows: list[Row] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with LLM(**settings, use_tqdm=False) as llm:
        run_workload(llm, workload("stream"))
        cache = llm.engine.scheduler.cache
        for _ in range(repeats):
            for on in (True, False):
                cache.enabled = on
                timing = run_workload(llm, load)
                seconds[on].append(timing.seconds)
                rows.append({"caching": "on" if on else "off", **_row("quire", timing)})
    ratios = [off / on for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "workload": "prefix",
        "says": f"prefix: {load.says}; {settings.get('model', 'smollm2')}",
        "rows": rows,
        "summary": [f"\ncaching makes it {median_and_spread(ratios)} times as fast"],
    }


def _row(engine: str, timing: Timing) -> Row:
    return {
        "engine": engine,
        "seconds": timing.seconds,
        "output tok/s": timing.tokens_per_second,
        "tokens computed": timing.computed_tokens,
        "tokens cached": timing.cached_tokens,
        "decode step ms": timing.decode_step_ms,
        "host share %": 100 * timing.host_share,
    }


def _peer(llm: LLM) -> TransformersPeer:
    from quire.bench.peer import TransformersPeer
    from quire.models.source import open_model

    runner = _runner(llm)
    source = open_model(llm.config.model, llm.config.load_format, progress=False)
    return TransformersPeer(source, runner.cache.layout.dtype, runner.device)


def _runner(llm: LLM) -> ModelRunner:
    from quire.runner.runner import ModelRunner

    assert isinstance(llm.engine.runner, ModelRunner)
    return llm.engine.runner
