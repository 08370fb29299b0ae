"""Tools as Anthropic defines them, and which of them are to be called, as OpenAI would say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
KEPT = {"name": "name", "description": "description", "input_schema": "parameters"}


def functions(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    return [_function(i, tool) for i, tool in enumerate(tools or ())]


def _function(index: int, tool: Any) -> dict[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object with a name and an input_schema.")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            f"{where} is {str(kind)[:64]!r}, a tool that Anthropic defines and this server has "
            "not; define it with a name and an input_schema."
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise RequestError(f"{where} needs an input_schema, which is a JSON schema.")
    function = {ours: tool[theirs] for theirs, ours in KEPT.items() if tool.get(theirs) is not None}
    if "strict" in tool:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def choice(given: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """Which calls are wanted, and whether there may be several."""
    if given is None:
        return None, True
    several = given.get("disable_parallel_tool_use") is not True
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, several
    if not isinstance(kind, str) or kind not in CHOICES:
        raise RequestError(
            "tool_choice must have the type 'auto', 'any', 'none', or 'tool' and its name."
        )
    return CHOICES[kind], several
