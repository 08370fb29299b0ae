"""Functions as they were before tools."""

from __future__ import annotations

import pytest

from quire.api.tools.legacy import as_tool_choice, as_tools, with_tool_calls
from quire.errors import RequestError


def test_functions_are_tools():
    assert as_tools([{"name": "f"}]) == [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="list"):
        as_tools({"name": "f"})


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_choices_that_are_the_same(choice):
    assert as_tool_choice(choice) == choice


def test_a_named_function():
    assert as_tool_choice({"name": "f"}) == {"type": "function", "function": {"name": "f"}}


def test_calls_and_results_of_the_history():
    call = {"name": "f", "arguments": "{}"}
    user = {"role": "user", "content": "Hi"}
    messages = [
        user,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
        "none",
    ]
    made = {"id": "call_f", "type": "function", "function": call}
    assert with_tool_calls(messages) == [
        user,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "name": "f", "content": "1", "tool_call_id": "call_f"},
        "none",
    ]
