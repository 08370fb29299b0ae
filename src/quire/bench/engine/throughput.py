"""`quire bench throughput`: a workload's tokens per second, beside a peer if asked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Protocol

from quire.bench.engine.workloads import SAYS, Workload, workload
from quire.bench.options import add_run_flags, listed
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row, check_json_path, publish

if TYPE_CHECKING:
    from quire.bench.engine.session import Session
    from quire.bench.engine.timing import Timing
    from quire.bench.report.roofline import Limit

EXAMPLES = f"""examples:
  quire bench throughput --workload cpu --compare transformers
  quire bench throughput --workload prefix --repeat 1
  quire bench throughput --workload beams --compare transformers
  quire bench throughput qwen3-0.6b --load-format dummy --workload nano --json nano.json
  quire bench throughput qwen3-0.6b --load-format dummy --workload nano --compare ranks
  quire bench throughput qwen3-8b --load-format dummy --workload nano --profile traces

workloads:
{listed(SAYS)}"""


class Peer(Protocol):
    """Another engine that runs the same requests."""

    name: str
    says: str  # what the ratio of the two times means, to be filled in

    def seconds(self, workload: Workload) -> float: ...
    def close(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--workload", choices=SAYS, default="cpu", help="which requests (default: cpu)"
    )
    parser.add_argument(
        "--compare",
        choices=["transformers", "ranks"],
        help="run it beside, in turns, in the same process; ranks: one rank as if it were several",
    )
    add_run_flags(parser, repeat=3, profile="a stretch of steady decode steps")


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    announce_model(settings)

    from quire.bench.engine.ranks_peer import room_for_two
    from quire.bench.engine.session import open_session
    from quire.bench.engine.steady_profile import profile_steady_steps
    from quire.bench.report.profile import trace_path

    if args.compare == "ranks":
        settings = room_for_two(settings)
    trace = trace_path(args.profile, f"throughput-{args.workload}")
    load = workload(args.workload)
    with open_session(load.settings | settings) as session:
        session.check_room(load.longest, "raise it or choose another --workload")
        if load.name == "prefix" and args.compare is None:
            result = caching_on_and_off(session, load, args.repeat)
        else:
            peer = _peer(session, args.compare, load, load.settings | settings)
            try:
                result = against_peer(session, load, peer, args.repeat)
            finally:
                if peer is not None:
                    peer.close()
        if trace is not None:
            result["profile"] = profile_steady_steps(session, load, trace)
        result = session.report(load.name, load.says) | result
    publish({"benchmark": "throughput", **result}, args.json)
    return 0


def against_peer(
    session: Session, load: Workload, peer: Peer | None, repeat: int
) -> dict[str, Any]:
    """Quire, and the peer in turns with it; the ratio is taken within each turn."""
    from quire.bench.engine.timing import run_workload

    ours: list[Timing] = []
    theirs: list[float] = []
    with runs_bar(load.name, repeat * (2 if peer else 1)) as bar:
        run_workload(session.llm, load.warm_up())
        for _ in range(repeat):
            ours.append(run_workload(session.llm, load))
            bar.update()
            if peer is not None:
                theirs.append(peer.seconds(load))
                bar.update()
    limit = _limit(session, load, session.llm.config.enable_prefix_caching)
    result = _result({"quire": limit}, [_quire_row({"engine": "quire"}, ours, load, limit)])
    if peer is not None:
        seconds = Sample(theirs)
        result["rows"].append({"engine": peer.name, **_speed(seconds, load, limit)})
        ratios = Sample(his / mine.seconds for mine, his in zip(ours, theirs, strict=True))
        result["ratio"] = ratios
        result["notes"].append(peer.says.format(ratios))
    return result


def caching_on_and_off(session: Session, load: Workload, repeat: int) -> dict[str, Any]:
    """The same requests with and without the prefix cache, in turns."""
    from quire.bench.engine.timing import run_workload

    cache = session.llm.engine.scheduler.cache
    asked_for = cache.enabled
    timings: dict[bool, list[Timing]] = {True: [], False: []}
    with runs_bar(load.name, 2 * repeat) as bar:
        run_workload(session.llm, load.warm_up())
        for _ in range(repeat):
            for on in (True, False):
                cache.enabled = on
                timings[on].append(run_workload(session.llm, load))
                bar.update()
    cache.enabled = asked_for
    limits = {"on": _limit(session, load, True), "off": _limit(session, load, False)}
    rows = [
        _quire_row({"caching": name}, timings[name == "on"], load, limit)
        for name, limit in limits.items()
    ]
    pairs = zip(timings[True], timings[False], strict=True)
    ratios = Sample(off.seconds / on.seconds for on, off in pairs)
    result = _result(limits, rows)
    result["ratio"] = ratios
    result["notes"].append(f"caching makes it {ratios} times as fast")
    return result


def _result(limits: dict[str, Limit], rows: list[Row]) -> dict[str, Any]:
    label = "" if len(limits) == 1 else " with caching {}"
    return {
        "rows": rows,
        "limits": {name: limit.as_dict() for name, limit in limits.items()},
        "notes": [
            f"the limit{label.format(name)} is {limit.seconds:.3g} s: {limit}"
            for name, limit in limits.items()
        ],
    }


def _limit(session: Session, load: Workload, caching: bool) -> Limit:
    from quire.bench.report.roofline import fresh_chunks

    block_size = session.llm.config.block_size if caching else None
    return session.roofline.workload(fresh_chunks(load.prompts, block_size), load.lengths)


def _quire_row(first: Row, timings: list[Timing], load: Workload, limit: Limit) -> Row:
    last = timings[-1]
    row = first | _speed(Sample(each.seconds for each in timings), load, limit)
    row |= {"computed": last.computed_tokens, "cached": last.cached_tokens, "steps": last.steps}
    if last.clock.has_steps:
        row |= {
            "decode step ms": last.clock.decode_step_ms,
            "% outside model": 100 * last.clock.host_share,
        }
    return row


def _speed(seconds: Sample, load: Workload, limit: Limit) -> Row:
    speed = seconds.map(lambda each: load.output_tokens / each)
    highest = load.output_tokens / limit.seconds
    return {
        "seconds": seconds.median,
        "output tok/s": speed,
        "limit": highest,
        "% of limit": 100 * speed.median / highest,
    }


def _peer(
    session: Session, name: str | None, load: Workload, settings: dict[str, Any]
) -> Peer | None:
    if name == "transformers":
        from quire.bench.engine.transformers_peer import TransformersPeer

        return TransformersPeer(session.source, session.dtype, session.device)
    if name == "ranks":
        from quire.bench.engine.ranks_peer import RanksPeer

        return RanksPeer(session.llm, settings, load)
    return None
