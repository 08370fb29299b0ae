"""What requests say of thinking, under the names that templates have."""

from __future__ import annotations

import pytest

from quire.api.reasoning.effort import thinking_variables

ON, OFF = ({"enable_thinking": on, "thinking": on} for on in (True, False))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"other": 1}, {"other": 1}),
        ({"enable_thinking": False}, OFF),
        ({"thinking": True}, ON),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", **OFF}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", **ON}),
        (
            {"reasoning_effort": "high", "enable_thinking": False},
            {"reasoning_effort": "high", **OFF},
        ),
        (
            {"enable_thinking": True, "thinking": False},
            {"enable_thinking": True, "thinking": False},
        ),
        ({"reasoning_effort": 3, "thinking": "x"}, {"reasoning_effort": 3, "thinking": "x"}),
        ({"reasoning_effort": []}, {"reasoning_effort": []}),
    ],
)
def test_all_names_say_the_same(given, expected):
    assert thinking_variables(given, has_channels=False) == expected


@pytest.mark.parametrize(
    ("effort", "shown"),
    [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("xhigh", "high")],
)
def test_channels_know_three_efforts(effort, shown):
    found = thinking_variables({"reasoning_effort": effort}, has_channels=True)
    assert found["reasoning_effort"] == shown
