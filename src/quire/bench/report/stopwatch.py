"""Times one call many times over, on the device's own clock where it has one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from quire.bench.report.sample import Sample

Call = Callable[[], object]

LEAST_CALLS, MOST_CALLS = 3, 200


def seconds_per_call(call: Call, device: torch.device, budget_s: float = 0.4) -> Sample:
    """The times of single calls after a warm-up, as many as fit into `budget_s`."""
    call()
    timed = _timed_on_gpu if device.type == "cuda" else _timed_on_cpu
    [first] = timed(call, 1)
    count = int(budget_s / max(first, 1e-7))
    return Sample(timed(call, max(LEAST_CALLS, min(count, MOST_CALLS))))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replayable(call: Call, device: torch.device) -> Call:
    """The call as a graph on a GPU, for short kernels take longer to launch than to run."""
    if device.type != "cuda":
        return call
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        call()  # what is compiled or allocated on first use must not be captured
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, _: Call) -> None:
    """The call is an argument for what it holds on to: the graph reads that memory."""
    graph.replay()


def _timed_on_cpu(call: Call, count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def _timed_on_gpu(call: Call, count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]
