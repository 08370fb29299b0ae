"""`quire bench latency`: how long one request takes when nothing else runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.bench.engine.workloads import Workload, answers, random_prompt
from quire.bench.options import add_run_flags, counts, listed
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row, check_json_path, publish
from quire.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from quire.bench.engine.session import Session
    from quire.bench.report.roofline import Limit

STREAM_IN, STREAM_OUT = 512, 256
LENGTHS = {"prefill": [1024, 4000, 8192, 16_384, 32_768], "cached": [4096, 16_384]}

SAYS = {
    "stream1": f"1 request, {STREAM_IN} in, {STREAM_OUT} out: ms for each token after the first",
    "prefill": "1 request of fresh random tokens, 1 out: ms to the answer",
    "cached": "1 request that was computed before, 1 out: ms to the answer",
}

EXAMPLES = f"""examples:
  quire bench latency --workload stream1
  quire bench latency --workload prefill --lengths 128,512 --repeat 3
  quire bench latency qwen3-8b --load-format dummy --workload prefill --json prefill.json
  quire bench latency qwen3-8b --load-format dummy --workload cached --lengths 16384

workloads:
{listed(SAYS)}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--workload", choices=SAYS, default="stream1", help="which request (default: stream1)"
    )
    parser.add_argument(
        "--lengths",
        type=counts,
        metavar="N,N,…",
        help="prompt lengths of prefill and cached (default: those of the workload that fit)",
    )
    add_run_flags(parser, repeat=5, profile="steady decode steps, or the longest prompt")


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    if args.lengths and args.workload not in LENGTHS:
        raise ConfigError(f"--lengths is for {' and '.join(LENGTHS)}; {args.workload} has its own.")
    if args.workload == "cached" and not settings.get("enable_prefix_caching", True):
        raise ConfigError("cached needs the prefix cache; leave out --no-enable-prefix-caching.")
    announce_model(settings)

    from quire.bench.engine.session import open_session
    from quire.bench.report.profile import trace_path

    trace = trace_path(args.profile, f"latency-{args.workload}")
    with open_session(settings) as session:
        if args.workload == "stream1":
            result = stream(session, args.repeat, trace)
        else:
            result = prompts(session, args.workload, args.lengths, args.repeat, trace)
        result = session.report(args.workload, SAYS[args.workload]) | result
    publish({"benchmark": "latency", **result}, args.json)
    return 0


def stream(session: Session, repeat: int, trace: Path | None) -> dict[str, Any]:
    """(t(256) − t(1)) / 255: the first token's time, prompt included, falls out."""
    session.check_room(STREAM_IN + STREAM_OUT, "raise it")
    first: list[float] = []
    each: list[float] = []
    with runs_bar("stream1", repeat) as bar:
        for seed in range(repeat + 1):
            prompt = random_prompt(STREAM_IN, seed)
            first.append(_seconds(session, prompt, 1))
            each.append((_seconds(session, prompt, STREAM_OUT) - first[-1]) / (STREAM_OUT - 1))
            bar.update(seed > 0)  # the first is the warm-up
    limit = session.roofline.stream()
    row = _row({"tokens in": STREAM_IN}, "ms per token", Sample(each[1:]), limit)
    result = {
        "rows": [{**row, "first token ms": Sample(first[1:]).map(_milliseconds)}],
        "notes": ["the limit is one reading of all weights"],
    }
    if trace is not None:
        from quire.bench.engine.steady_profile import profile_steady_steps

        load = Workload("stream", [random_prompt(STREAM_IN, 0)], answers([STREAM_OUT]))
        result["profile"] = profile_steady_steps(session, load, trace)
    return result


def prompts(
    session: Session, workload: str, asked: list[int] | None, repeat: int, trace: Path | None
) -> dict[str, Any]:
    lengths, notes = _lengths(session, workload, asked)
    measure = {"prefill": _prefill_row, "cached": _cached_row}[workload]
    with runs_bar(workload, len(lengths) * repeat) as bar:
        rows = [measure(session, length, repeat, bar.update) for length in lengths]
    result = {"rows": rows, "notes": notes}
    if trace is not None:
        result["profile"] = _profile(session, workload, max(lengths), trace)
    return result


def _prefill_row(session: Session, length: int, repeat: int, done: Callable[[], object]) -> Row:
    seconds = []
    for seed in range(repeat + 1):
        seconds.append(_seconds(session, random_prompt(length, seed), 1))
        if seed:
            done()
    limit = session.roofline.prompt(length)
    return _row({"tokens in": length}, "ms", Sample(seconds[1:]), limit)


def _cached_row(session: Session, length: int, repeat: int, done: Callable[[], object]) -> Row:
    cold, again, hits = [], [], 0
    for seed in range(repeat + 1):
        prompt = random_prompt(length, seed)
        cold.append(_seconds(session, prompt, 1))
        before = _hits(session)
        again.append(_seconds(session, prompt, 1, forget=False))
        hits = _hits(session) - before
        if seed:
            done()
    limit = session.roofline.cached_prompt(length)
    cold_ms = Sample(cold[1:]).map(_milliseconds)
    first = {"tokens in": length, "cached": hits, "cold ms": cold_ms}
    return _row(first, "cached ms", Sample(again[1:]), limit)


def _hits(session: Session) -> int:
    """Tokens found in the cache so far."""
    return int(session.llm.stats()["prefix"]["hits"])


def _row(first: Row, name: str, seconds: Sample, limit: Limit) -> Row:
    return {
        **first,
        name: seconds.map(_milliseconds),
        "limit": _milliseconds(limit.seconds),
        "% of limit": 100 * limit.seconds / seconds.median,
    }


def _milliseconds(seconds: float) -> float:
    return 1e3 * seconds


def _seconds(session: Session, prompt: list[int], tokens: int, forget: bool = True) -> float:
    from quire.bench.engine.timing import generate_seconds

    if forget:
        session.llm.reset_prefix_cache()
    return generate_seconds(session.llm, [prompt], answers([tokens]))


def _lengths(
    session: Session, workload: str, asked: list[int] | None
) -> tuple[list[int], list[str]]:
    """All that were asked for, or those of the workload's own that fit; and what to say of it."""
    mend = "raise it or choose shorter --lengths"
    if asked is not None:
        session.check_room(max(asked) + 1, mend)
        return asked, []
    room = session.llm.engine.model.max_model_len
    fit = [length for length in LENGTHS[workload] if length < room]
    left_out = [f"{length:,}" for length in LENGTHS[workload] if length >= room]
    if not fit:
        session.check_room(min(LENGTHS[workload]) + 1, mend)
    says = f"max_model_len is {room:,}, so {' and '.join(left_out)} tokens are left out"
    return fit, [says] if left_out else []


def _profile(session: Session, workload: str, length: int, trace: Path) -> dict[str, Any]:
    from quire.bench.report.profile import described, record

    prompt, other = random_prompt(length, seed=1), random_prompt(length, seed=2)
    warm_up = prompt if workload == "cached" else other
    findings = record(
        lambda: _seconds(session, prompt, 1, forget=False),
        lambda: _seconds(session, warm_up, 1),
        session.device,
        trace,
    )
    return described(findings, f"prompt of {length:,} tokens", 1, trace)
