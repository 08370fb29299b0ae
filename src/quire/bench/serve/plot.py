"""Latency curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.bench.report.picture import save
from quire.bench.serve.answer import Outcome
from quire.bench.serve.figures import latencies

SHOWN = {"first token": "C0", "between tokens": "C1", "end to end": "C2"}


def draw(path: str, outcomes: Sequence[Outcome], title: str) -> None:
    """Left every latency by the share of requests below it, right over the time of the run."""
    from matplotlib.figure import Figure

    answered = [outcome for outcome in outcomes if outcome.error is None]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, history = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title, fontsize=10)
    _draw_curves(curves, answered)
    _draw_history(history, answered)
    save(figure, path, dpi=150)


def _draw_curves(axes: Any, answered: Sequence[Outcome]) -> None:
    shares = np.linspace(0, 100, 501)
    found = latencies(answered)
    for name, colour in SHOWN.items():
        if len(found[name]):
            axes.plot(shares, np.percentile(found[name], shares), color=colour, label=name)
    axes.set(xlabel="percentile", ylabel="ms", yscale="log", xlim=(0, 100))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.2)
    if answered:
        axes.legend()


def _draw_history(axes: Any, answered: Sequence[Outcome]) -> None:
    begin = [outcome.at for outcome in answered]
    first = [1e3 * (outcome.first or 0.0) for outcome in answered]
    total = [1e3 * (outcome.total or 0.0) for outcome in answered]
    axes.scatter(begin, first, s=6, color=SHOWN["first token"], label="first token")
    axes.scatter(begin, total, s=6, color=SHOWN["end to end"], label="end to end")
    axes.set(xlabel="when it was sent, s")
    axes.grid(True, which="both", alpha=0.2)
