"""Functions as OpenAI's chats had them before tools: `functions`, `function_call`, role `function`.

Requests are read as if they had tools; `FunctionCallWriter` writes a call the older way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError


def as_tools(functions: Any) -> Any:
    if not isinstance(functions, list):
        raise RequestError("functions must be a list of functions.")
    return [{"type": "function", "function": each} for each in functions]


def as_tool_choice(function_call: Any) -> Any:
    """`none` and `auto` are the same there and here; a name stands alone in an object."""
    if not isinstance(function_call, Mapping):
        return function_call
    return {"type": "function", "function": dict(function_call)}


def with_tool_calls(messages: Sequence[Any]) -> list[Any]:
    """The same conversation, with calls and results as messages with tools have them."""
    return [_as_now(message) for message in messages]


def _as_now(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": _id(message.get("name"))}
    call = message.get("function_call")
    if not isinstance(call, Mapping):
        return message
    kept = {name: value for name, value in message.items() if name != "function_call"}
    made = {"id": _id(call.get("name")), "type": "function", "function": dict(call)}
    return {**kept, "tool_calls": [made]}


def _id(name: Any) -> str:
    """A call had no id: its function's name joins it to its result."""
    return f"call_{name}"
