"""`quire bench decode`: the processor time of a decode step, beside `transformers` if asked.

Processor time is what the process's own threads took. Other programs on the machine disturb it much
less than wall time.
"""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING, Any

from quire.bench.options import add_run_flags, count, counts
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row, check_json_path, publish
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.engine.session import Session
    from quire.bench.engine.transformers_peer import TransformersPeer

PROMPT, STEPS = 64, 32  # tokens of each stream

EXAMPLES = """examples:
  quire bench decode
  quire bench decode small-experts --load-format dummy --compare transformers --threads 1
  quire bench decode qwen3-0.6b --load-format dummy --dtype float32 --streams 1,8,32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--streams",
        type=counts,
        default=[1, 32],
        metavar="N,N,…",
        help="how many sequences a step has, one table row each (default: 1,32)",
    )
    parser.add_argument("--threads", type=count, metavar="N", help="of torch (default: its own)")
    parser.add_argument(
        "--compare", choices=["transformers"], help="run it beside, in turns, in the same process"
    )
    add_run_flags(parser, repeat=4)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    announce_model(settings)

    import torch

    from quire.bench.engine.session import open_session
    from quire.bench.engine.transformers_peer import TransformersPeer

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with open_session(settings) as session:
        if session.device.type != "cpu":
            raise ConfigError(
                "quire bench decode measures a processor's time; add --device cpu, or use "
                "quire bench latency."
            )
        session.check_room(PROMPT + STEPS + 1, "raise it")
        peer = None
        if args.compare is not None:
            peer = TransformersPeer(session.source, session.dtype, session.device)
        rows = [_row(session, peer, streams, args.repeat) for streams in args.streams]
        says = f"{PROMPT} tokens in, then {STEPS} steps, on {torch.get_num_threads()} threads"
        result = session.report("decode", says)
    notes = [
        "ms of processor time for each step; the prompts' own, with a token each, is taken off"
    ]
    publish({"benchmark": "decode", **result, "rows": rows, "notes": notes}, args.json)
    return 0


def _row(session: Session, peer: TransformersPeer | None, streams: int, repeat: int) -> Row:
    prompts = _prompts(session.llm.engine.model.vocab_size, streams)
    ours: list[float] = []
    theirs: list[float] = []
    with runs_bar(f"{streams} streams", repeat) as bar:
        for number in range(repeat + 1):  # the first is a warm-up
            ours.append(_step(session, prompts))
            if peer is not None:
                theirs.append(peer.step_processor_seconds(prompts, STEPS))
            bar.update(bool(number))
    row: Row = {"streams": streams, "quire ms": _milliseconds(ours[1:])}
    if peer is not None:
        pairs = zip(ours[1:], theirs[1:], strict=True)
        row |= {
            "transformers ms": _milliseconds(theirs[1:]),
            "ratio": Sample(his / mine for mine, his in pairs),
        }
    return row


def _step(session: Session, prompts: list[list[int]]) -> float:
    """Of one step, from runs with and without the steps."""
    from quire.bench.engine.timing import generate_processor_seconds
    from quire.bench.engine.workloads import answers

    found = []
    for length in (STEPS + 1, 1):
        session.llm.reset_prefix_cache()
        params = answers([length] * len(prompts))
        found.append(generate_processor_seconds(session.llm, prompts, params))
    whole, first = found
    return (whole - first) / STEPS


def _prompts(vocab_size: int, streams: int) -> list[list[int]]:
    choose = random.Random(0)
    return [[choose.randrange(vocab_size) for _ in range(PROMPT)] for _ in range(streams)]


def _milliseconds(seconds: list[float]) -> Sample:
    return Sample(1e3 * each for each in seconds)
