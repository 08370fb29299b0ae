"""What is read out of a trace, with events that were made up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.bench.report.profiler_trace import WINDOW, Interval, covered, find_costs, idle_share


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(-5, 20)], 10),
        ([(-5, 3), (8, 12)], 5),
        ([(1, 4), (2, 3)], 3),  # one inside the other
        ([(1, 4), (3, 6)], 5),  # one into the other
        ([(3, 6), (1, 4), (1, 4)], 5),  # in any order, and twice
        ([(1, 3), (3, 5)], 4),
        ([(2, 2)], 0),
        ([(-3, -1), (11, 12)], 0),
    ],
)
def test_overlaps_count_once_and_only_inside_the_window(
    intervals: list[Interval], length: float
) -> None:
    assert covered(intervals, (0, 10)) == length
    assert idle_share(intervals, (0, 10)) == pytest.approx(1 - length / 10)


def test_covered_agrees_with_counting_moments() -> None:
    r = random.Random(0)
    for _ in range(50):
        starts = [r.randint(-10, 60) for _ in range(12)]
        intervals = [(s, s + r.randint(0, 9)) for s in starts]
        moments = sum(any(s <= t < e for s, e in intervals) for t in range(50))
        assert covered(intervals, (0, 50)) == moments


def test_an_empty_window_is_not_idle() -> None:
    assert idle_share([(0, 1)], (5, 5)) == 0


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def window(ts: float, dur: float) -> dict[str, Any]:
    return event("user_annotation", WINDOW, ts, dur)


def test_on_a_gpu_kernels_count_and_their_overlap_does_not() -> None:
    found = find_costs(
        [
            {"ph": "M", "name": "process_name"},
            window(100, 1000),
            event("gpu_user_annotation", WINDOW, 100, 1000),  # its shadow on the device: no kernel
            event("kernel", "before", 0, 90),
            event("kernel", "matmul", 100, 300, tid=7),
            event("kernel", "matmul", 500, 300, tid=7),
            event("kernel", "attention", 300, 200, tid=8),
            event("gpu_memcpy", "copy", 900, 50, tid=8),
            event("cpu_op", "aten::mm", 100, 900),
        ]
    )
    assert found.on_gpu
    assert found.window_s == pytest.approx(1e-3)
    assert found.idle_share == pytest.approx(0.25)  # 800 to 900 and 950 to 1100
    assert [(c.name, c.calls) for c in found.costs] == [
        ("matmul", 2),
        ("attention", 1),
        ("copy", 1),
    ]
    assert found.costs[0].seconds == pytest.approx(6e-4)
    assert found.costs[0].share == pytest.approx(0.6)


def test_on_a_cpu_an_operator_is_charged_without_those_it_calls() -> None:
    found = find_costs(
        [
            window(0, 100),
            event("cpu_op", "outer", 10, 50),
            event("cpu_op", "inner", 20, 10),
            event("cpu_op", "innermost", 22, 4),
            event("cpu_op", "inner", 40, 20),  # ends with its caller
            event("cpu_op", "next", 60, 20),
            event("cpu_op", "elsewhere", 0, 100, tid=2),
        ]
    )
    assert not found.on_gpu
    assert found.idle_share == pytest.approx(0.3)
    microseconds = {cost.name: round(1e6 * cost.seconds) for cost in found.costs}
    assert microseconds == {"inner": 26, "outer": 20, "next": 20, "innermost": 4}


def test_ten_costs_are_the_largest() -> None:
    many = [event("kernel", f"k{i}", 10 * i, i) for i in range(20)]
    costs = find_costs([window(0, 1000), *many]).costs
    assert [cost.name for cost in costs] == [f"k{i}" for i in range(19, 9, -1)]
