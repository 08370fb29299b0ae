"""Records a stretch of work with torch's profiler and tells what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from quire.bench.report.profiler_trace import WINDOW, Cost, Findings, find_costs
from quire.bench.report.stopwatch import synchronise
from quire.bench.report.table import Row
from quire.errors import ConfigError

Work = Callable[[], object]

WIDEST_NAME = 72  # the names of template kernels fill a screen


def trace_path(given: str | None, benchmark: str) -> Path | None:
    """`given` if it ends in .json, else a file in the folder of that name, which is made."""
    if given is None:
        return None
    path = Path(given)
    if path.suffix != ".json":
        path /= f"{benchmark}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--profile {given} cannot be made: {reason}; use another.") from None
    return path


def record(work: Work, warm_up: Work, device: torch.device, path: Path) -> Findings:
    """Only `work` counts; the profiler's own first moments fall into `warm_up`.

    On a GPU only what the GPU does is recorded: to record the host slows it down, and a GPU that
    waits for a slow host looks idle.
    """
    on_gpu = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would report its start and its end
    with torch_profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        warm_up()
        synchronise(device)
        profiler.step()
        with record_function(WINDOW):
            work()
            synchronise(device)
        profiler.step()
    return find_costs(json.loads(path.read_text())["traceEvents"])


def described(findings: Findings, what: str, count: int, path: Path) -> dict[str, Any]:
    """For the report: `count` steps, prompts or calls were profiled."""
    milliseconds = 1e3 * findings.window_s
    each = f" ({milliseconds / count:.3g} ms each)" if count > 1 else ""
    outside = "the GPU was idle for" if findings.on_gpu else "outside torch's operators were"
    return {
        "says": f"profile of {count} {what} in {milliseconds:,.1f} ms{each}: "
        f"{outside} {100 * findings.idle_share:.1f} % of it; the trace is in {path}",
        "trace": str(path),
        "count": count,
        "window_s": findings.window_s,
        "idle_share": findings.idle_share,
        "on_gpu": findings.on_gpu,
        "costs": [_row(cost) for cost in findings.costs],
    }


def _row(cost: Cost) -> Row:
    if len(cost.name) > WIDEST_NAME:
        cost = replace(cost, name=cost.name[: WIDEST_NAME - 1] + "…")
    return {
        "cost": cost.name,
        "calls": cost.calls,
        "ms": 1e3 * cost.seconds,
        "%": 100 * cost.share,
    }
