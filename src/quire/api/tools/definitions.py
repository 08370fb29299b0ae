"""Tools as a request defines them, and which of them it wants to be called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.tools.custom import CUSTOM, InputFormat
from quire.checks import did_you_mean
from quire.errors import RequestError

MAX_TOOLS = 128
ALLOWED = "allowed_tools"
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema
    strict: bool
    given: Mapping[str, Any]  # as chat templates expect it
    custom: InputFormat | None = None  # of a custom tool


@dataclass(frozen=True)
class ToolChoice:
    """Which calls are wanted: none, any or none, at least one, or one of a certain tool."""

    kind: str  # none, auto, required or function
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        return self.kind in ("required", "function")


def read_tools(given: Any) -> list[Tool]:
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise RequestError("tools must be a list of functions.")
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools has {len(given):,} functions; send at most {MAX_TOOLS}.")
    tools = [_read_tool(i, each) for i, each in enumerate(given)]
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"tools has {name!r} more than once; give each its own name.")
    return tools


def _read_tool(index: int, given: Any) -> Tool:
    where = f"tools[{index}]"
    kind = given.get("type", "function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or kind not in ("function", CUSTOM):
        raise RequestError(
            f"{where} must be of the form {{'type': 'function', 'function': …}}, or the same with "
            "'custom'."
        )
    function = given.get(kind)
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} needs a {kind} with a name.")
    custom = None
    if kind == CUSTOM:
        custom = InputFormat.read(where, function.get("format"))
        function = custom.function(function)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where} needs a name of 1 to 128 letters, digits, underscores, dashes or dots."
        )
    if not isinstance(parameters, (Mapping, type(None))):
        raise RequestError(f"{where} needs parameters that are a JSON schema.")
    if not isinstance(function.get("description"), (str, type(None))):
        raise RequestError(f"{where} needs a description that is a text.")
    strict = function.get("strict")
    if not isinstance(strict, (bool, type(None))):
        raise RequestError(f"{where} needs strict to be true or false.")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters is not None:
        schema = {"type": "object", **parameters}
    shown = {"type": "function", "function": dict(function)}
    return Tool(name, schema, bool(strict), shown, custom)


def choose_tools(given: Any, tools: Sequence[Tool]) -> tuple[Sequence[Tool], ToolChoice]:
    """The tools that may be called, and which calls are wanted."""
    if isinstance(given, Mapping) and given.get("type") == ALLOWED:
        tools, given = _allowed(given.get(ALLOWED), tools)
    return tools, read_choice(given, tools)


def _allowed(given: Any, tools: Sequence[Tool]) -> tuple[list[Tool], str]:
    """Of `allowed_tools`: the tools it names, and its mode, which is a choice among them."""
    named = given.get("tools") if isinstance(given, Mapping) else None
    is_list = isinstance(named, list) and all(isinstance(each, Mapping) for each in named)
    if named is None or not is_list or given.get("mode") not in ("auto", "required"):
        raise RequestError(
            "tool_choice of the type 'allowed_tools' needs a mode, 'auto' or 'required', and tools."
        )
    names = {read_choice(each, tools).name for each in named}
    return [tool for tool in tools if tool.name in names], given["mode"]


def read_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The default is to call if the model likes, where there is anything to call."""
    if given is None:
        return ToolChoice("auto" if tools else "none")
    if given in ("none", "auto"):
        return ToolChoice(given if tools else "none")
    if given == "required":
        if not tools:
            raise RequestError("tool_choice 'required' needs tools; give some.")
        return ToolChoice("required")
    kind = given.get("type", "function") if isinstance(given, Mapping) else None
    function = given.get(kind) if kind in ("function", CUSTOM) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required', allowed_tools or "
            "{'type': 'function', 'function': {'name': …}}, or the same with 'custom'."
        )
    names = [tool.name for tool in tools]
    if name not in names:
        mend = did_you_mean(name[:64], names) or "; give it in tools."
        raise RequestError(f"tool_choice names {name[:64]!r}, which is no tool{mend}")
    return ToolChoice("function", name)
