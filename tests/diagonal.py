"""Of tests over the product of several parameters, the cases that a short run leaves out.

As many stay as show every value of each parameter, beside different values of the others;
`make test-long` takes all. A test asks for that with the mark `diagonal`. What Triton's interpreter
computes, in seconds where a GPU needs none, is always thinned out so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from effort import IS_LONG


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    if IS_LONG:
        return []
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "[interpreter" in item.name or item.get_closest_marker("diagonal"):
            tests[item.nodeid.partition("[")[0]].append(item)
    return [item for cases in tests.values() for item in _beside_diagonals(cases)]


def _beside_diagonals(cases: list[pytest.Item]) -> list[pytest.Item]:
    """With the second largest number of values as the distance, diagonals miss no value."""
    columns = [_numbered(column) for column in zip(*map(_values, cases), strict=True)]
    counts = sorted(max(column) + 1 for column in columns)
    distance = counts[-2] if len(counts) > 1 else 1
    places = zip(*columns, strict=True)
    return [case for case, place in zip(cases, places, strict=False) if sum(place) % distance]


def _values(case: pytest.Item) -> list[str]:
    """Of its parameters, mark by mark; those of fixtures do not count."""
    params = case.callspec.params  # type: ignore[attr-defined]
    named = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [each.replace(" ", "").split(",") if isinstance(each, str) else each for each in named]
    return [repr([params[name] for name in of_mark]) for of_mark in names]


def _numbered(values: Sequence[str]) -> list[int]:
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [numbers[value] for value in values]
