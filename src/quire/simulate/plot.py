"""Curves of a simulation as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.bench.report.picture import save


def draw(path: str, results: Sequence[dict[str, Any]], title: str) -> None:
    """Left the time to the first token by the share of requests below it, right the GPU hours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(title, fontsize=10)
    _draw_curves(curves, results)
    _draw_hours(bars, results)
    save(figure, path, dpi=100)


def _draw_curves(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        milliseconds = [1e3 * seconds for seconds in result["first_token"]]
        axes.plot(range(len(milliseconds)), milliseconds, label=result["row"])
    axes.set(xlabel="percentile", ylabel="first token, ms", yscale="log", xlim=(0, 100))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)


def _draw_hours(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    names = [result["row"] for result in results]
    prompts = [result["gpu_hours_of_prompts"] for result in results]
    decodes = [result["gpu_hours"] - result["gpu_hours_of_prompts"] for result in results]
    axes.barh(names, prompts, color="C0", label="prompts")
    axes.barh(names, decodes, left=prompts, color="C1", label="decodes")
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set(xlabel="GPU hours")
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(True, axis="x", alpha=0.2)
    axes.legend(fontsize=8)
