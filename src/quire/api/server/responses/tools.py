"""Tools and `tool_choice` as the Responses API has them, in the form that chats have.

A tool of a namespace is one of the name `namespace.tool` for the model, and its calls are shown
with both names. Agents offer tools that OpenAI runs whichever model they ask: those are left out,
as long as there are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.api.server.errors import bad_request
from quire.api.tools.custom import CUSTOM
from quire.api.tools.definitions import ALLOWED

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
CUSTOM_FIELDS = ("name", "description", "format")
NAMESPACE = "namespace"
LEFT_OUT = ("web_search", "image_generation", "tool_search")  # how the types of such tools begin


def chat_tools(given: list[Any] | None) -> list[Any]:
    """Functions have their fields one level deeper there; other tools are refused by name."""
    every = [*enumerate(given or ())]
    own = [(i, tool) for i, tool in every if not is_left_out(tool)]
    return [
        _chat_tool(where, tool)
        for i, outer in own or every  # what would be left out is refused where it is all there is
        for where, tool in _with_namespace(f"tools[{i}]", outer)
    ]


def is_left_out(tool: Any) -> bool:
    kind = _kind(tool)
    return isinstance(kind, str) and kind.startswith(LEFT_OUT)


def namespaces(given: list[Any] | None) -> dict[str, str]:
    """Those of tools that have one, by the name that the model calls them by."""
    return {
        tool["name"]: outer["name"]
        for outer in given or ()
        if _kind(outer) == NAMESPACE
        for _, tool in _with_namespace("", outer)
    }


def name_for_model(namespace: object, name: str) -> str:
    return f"{namespace}.{name}" if isinstance(namespace, str) else name


def _kind(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, Mapping) else None


def _with_namespace(where: str, outer: Any) -> Iterator[tuple[str, Any]]:
    """A tool, or those of a namespace."""
    if _kind(outer) != NAMESPACE:
        yield where, outer
        return
    name, inner = outer.get("name"), outer.get("tools")
    if not isinstance(name, str) or not name or not isinstance(inner, list):
        raise bad_request(f"{where} needs a name, and tools, which are a list.", param="tools")
    for i, tool in enumerate(inner):
        own = tool.get("name") if isinstance(tool, Mapping) else None
        if not isinstance(own, str):
            raise bad_request(f"{where}.tools[{i}] needs a name.", param="tools")
        yield f"{where}.tools[{i}]", {**tool, "name": name_for_model(name, own)}


def _chat_tool(where: str, tool: Any) -> dict[str, Any]:
    kind = _kind(tool)
    if kind == CUSTOM:
        return {"type": CUSTOM, CUSTOM: _custom(tool)}
    if kind != "function":
        raise bad_request(
            f"{where} is of the type {str(kind)[:64]!r}, which this server does not run; "
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
    name = given.get("name")
    if isinstance(name, str):
        name = name_for_model(given.get(NAMESPACE), name)
    return {"type": given.get("type", kind), kind: {"name": name}}
