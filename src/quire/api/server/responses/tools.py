"""Tools and `tool_choice` as the Responses API has them, in the form that chats have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.server.errors import bad_request
from quire.api.tools.custom import CUSTOM
from quire.api.tools.definitions import ALLOWED

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
CUSTOM_FIELDS = ("name", "description", "format")


def chat_tools(given: list[Any] | None) -> list[Any]:
    """Functions have their fields one level deeper there; other tools are refused by name."""
    return [_chat_tool(i, tool) for i, tool in enumerate(given or ())]


def _chat_tool(index: int, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(tool, Mapping) and kind == CUSTOM:
        return {"type": CUSTOM, CUSTOM: _custom(tool)}
    if not isinstance(tool, Mapping) or kind != "function":
        raise bad_request(
            f"tools[{index}] is of the type {str(kind)[:64]!r}, which this server does not run; "
            "define a function and run it yourself.",
            param="tools",
        )
    given = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": given}


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A grammar's fields are one level deeper in chats, too."""
    given = {name: tool[name] for name in CUSTOM_FIELDS if tool.get(name) is not None}
    form = given.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        given["format"] = {"type": "grammar", "grammar": form}
    return given


def chat_tool_choice(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    if given.get("type") in ("function", CUSTOM):
        return _named(given)
    if given.get("type") == ALLOWED and isinstance(given.get("tools"), list):
        tools = [_named(each) if isinstance(each, Mapping) else each for each in given["tools"]]
        return {"type": ALLOWED, ALLOWED: {"mode": given.get("mode"), "tools": tools}}
    raise bad_request(
        f"tool_choice is of the type {str(given.get('type'))[:64]!r}; "
        "this server knows function, custom and allowed_tools.",
        param="tool_choice",
    )


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = CUSTOM if given.get("type") == CUSTOM else "function"
    return {"type": given.get("type", kind), kind: {"name": given.get("name")}}
