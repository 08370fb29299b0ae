"""What the outcomes say together: latencies, throughput, goodput, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.report.table import Row
from quire.bench.serve.answer import Outcome
from quire.bench.serve.load import Result

BUSY = 0.8  # of a core: a process that works more than that may report its own delays
LATE_MS = 20.0


@dataclass(frozen=True)
class Objective:
    """What a user is to get, in ms: the first token, and each next one on average."""

    ttft: float | None = None
    itl: float | None = None

    def __bool__(self) -> bool:
        return self.ttft is not None or self.itl is not None

    def __str__(self) -> str:
        first = f"the first token within {self.ttft:g} ms" if self.ttft is not None else ""
        between = f"{self.itl:g} ms a token after it" if self.itl is not None else ""
        return " and ".join(filter(None, [first, between]))

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.error is not None or outcome.first is None:
            return False
        is_prompt = self.ttft is None or 1e3 * outcome.first <= self.ttft
        return is_prompt and (self.itl is None or 1e3 * (per_token(outcome) or 0.0) <= self.itl)


def per_token(outcome: Outcome) -> float | None:
    """The mean time of a token after the first."""
    if outcome.first is None or outcome.num_out < 2:
        return None
    return (outcome.last - outcome.first) / (outcome.num_out - 1)


def latencies(answered: Sequence[Outcome]) -> dict[str, np.ndarray[Any, Any]]:
    """In ms, over all requests that were answered; between tokens over all of their chunks."""
    gaps = [np.frombuffer(outcome.gaps, dtype=np.float64) for outcome in answered]
    found: dict[str, Any] = {
        "first token": [outcome.first for outcome in answered],
        "between tokens": np.concatenate(gaps) if gaps else [],
        "mean per token": [per_token(outcome) for outcome in answered],
        "end to end": [outcome.total for outcome in answered],
    }
    return {name: 1e3 * _known(values) for name, values in found.items()}


def _known(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values, dtype=np.float64)  # None becomes NaN
    return array[~np.isnan(array)]


def summarize(result: Result, objective: Objective) -> dict[str, Any]:
    answered = [outcome for outcome in result.outcomes if outcome.error is None]
    count_tokens(answered)
    seconds = _seconds(result.outcomes)
    tokens = {
        "in": sum(outcome.num_in for outcome in answered),
        "cached": sum(outcome.num_cached for outcome in answered),
        "out": sum(outcome.num_out for outcome in answered),
    }
    return {
        "rows": _rows(latencies(answered)),
        "seconds": seconds,
        "requests": _requests(result.outcomes, answered),
        "tokens": tokens,
        "throughput": {
            "requests/s": len(answered) / seconds,
            "input tok/s": tokens["in"] / seconds,
            "output tok/s": tokens["out"] / seconds,
        },
        "goodput": _goodput(result.outcomes, objective, seconds) if objective else None,
        "client": _client(result, seconds),
    }


def count_tokens(answered: Sequence[Outcome]) -> None:
    """Where a server does not say how many tokens it sent, every chunk counts as one."""
    for outcome in answered:
        if not outcome.num_out and outcome.first is not None:
            outcome.num_out = len(outcome.gaps) + 1


def _seconds(outcomes: Sequence[Outcome]) -> float:
    """From the first request to the last answer."""
    ends = [outcome.at + outcome.total for outcome in outcomes if outcome.total is not None]
    return max(1e-9, max(ends, default=0.0) - min(outcome.at for outcome in outcomes))


def _rows(found: dict[str, np.ndarray[Any, Any]]) -> list[Row]:
    return [
        {"ms": name}
        | {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}
        | {"mean": float(values.mean()), "max": float(values.max())}
        for name, values in found.items()
        if len(values)
    ]


def _requests(outcomes: Sequence[Outcome], answered: Sequence[Outcome]) -> dict[str, Any]:
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    kinds = Counter(outcome.error for outcome in failed)
    return {
        "sent": len(outcomes),
        "answered": len(answered),
        "failed": len(failed),
        "errors": dict(kinds.most_common()),
        "messages": {outcome.error: outcome.message for outcome in reversed(failed)},
        "short": sum(outcome.num_out < outcome.num_asked for outcome in answered),
    }


def _goodput(outcomes: Sequence[Outcome], objective: Objective, seconds: float) -> dict[str, Any]:
    good = sum(map(objective.is_met, outcomes))
    return {
        "slo_ttft_ms": objective.ttft,
        "slo_itl_ms": objective.itl,
        "requests/s": good / seconds,
        "share": good / len(outcomes),
    }


def _client(result: Result, seconds: float) -> dict[str, Any]:
    late = _known([outcome.late for outcome in result.outcomes])
    return {
        "processes": len(result.cpu_seconds),
        "cores": sum(result.cpu_seconds) / seconds,
        "busiest": max(result.cpu_seconds) / seconds,
        "late_ms": 1e3 * float(np.percentile(late, 99)),
    }


def notes(found: dict[str, Any], objective: Objective) -> list[str]:
    """What the tables do not say."""
    requests, tokens, client = found["requests"], found["tokens"], found["client"]
    lines = []
    if found["goodput"] is not None:
        share, rate = 100 * found["goodput"]["share"], found["goodput"]["requests/s"]
        lines.append(f"goodput {rate:.2f} requests/s: {share:.1f} % had {objective}")
    for kind, count in requests["errors"].items():
        says = " ".join(str(requests["messages"][kind]).split())[:200]
        lines.append(f"failed: {count:,} × {kind}{': ' + says if says else ''}")
    if tokens["cached"]:
        lines.append(f"{100 * tokens['cached'] / tokens['in']:.1f} % of prompt tokens were cached")
    if requests["short"]:
        lines.append(f"{requests['short']:,} answers were shorter than asked (see --ignore-eos)")
    lines.append(
        f"the client took {client['cores']:.2f} of a core in {client['processes']} "
        f"process{'es' if client['processes'] > 1 else ''}, "
        f"and sent within {client['late_ms']:.1f} ms of the time due (p99)"
    )
    if client["busiest"] > BUSY or client["late_ms"] > LATE_MS:
        lines.append("the client may have slowed what it measured; give it more --processes")
    return lines
