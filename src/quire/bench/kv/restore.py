"""One prompt, first new, then on the device, then only in a lower tier: time to its first token."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.bench.engine.workloads import answers, random_prompt
from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row

if TYPE_CHECKING:
    from quire.bench.engine.session import Session

LENGTHS = [4096, 16_384, 32_768]
FLUSH_S = 60.0


def run_restore(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    lengths = args.lengths or [n for n in LENGTHS if n < session.llm.engine.model.max_model_len]
    session.check_room(max(lengths, default=LENGTHS[0]) + 1, "raise it or choose --lengths")
    with runs_bar("restore", len(lengths) * args.repeat) as bar:
        rows = [_row(session, length, args.repeat, bar.update) for length in lengths]
    return {"rows": rows, "notes": ["each prompt is new, then cached, then pushed off the device"]}


def _row(session: Session, length: int, repeat: int, done: Callable[[], object]) -> Row:
    from quire.bench.engine.timing import generate_seconds

    llm = session.llm
    tiering, store = session.tiering("restore")
    times: dict[str, list[float]] = {"cold": [], "device": [], "tier": []}
    places: dict[str, int] = {}
    moved = 0  # bytes, for the last prompt that came from a tier
    for seed in range(repeat + 1):
        prompt = random_prompt(length, seed + 1000 * length)
        for kind in times:
            if kind == "tier":
                store.flush(FLUSH_S)
                llm.reset_prefix_cache(device_only=True)
            before, moved = tiering.tokens_by_tier.copy(), store.host.counters.reads.bytes
            times[kind].append(generate_seconds(llm, [prompt], answers([1])))
            places = dict(tiering.tokens_by_tier - before)
            moved = store.host.counters.reads.bytes - moved
        if seed:
            done()
    samples = {kind: Sample(each[1:]) for kind, each in times.items()}
    return {
        "tokens in": length,
        **{f"{kind} ms": sample.map(lambda s: 1e3 * s) for kind, sample in samples.items()},
        "from": " ".join(f"{tier} {count:,}" for tier, count in places.items()) or "computed",
        "GB/s": moved / samples["tier"].median / 1e9,
    }
