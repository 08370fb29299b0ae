"""A conversation with calls and their results, as chat templates expect it.

Templates that know tools get them as they are, and arguments as objects. To others the tools are
explained in the system's message, and calls and results are written as text, in Hermes's way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from quire.api.tools.definitions import Tool
from quire.api.tools.hermes import CLOSE, OPEN

Message = Mapping[str, Any]

EXPLANATION = """You can call these functions; each line describes one:
{tools}

To call one, write its name and its arguments as JSON between tags, and nothing behind them:
{open}
{{"name": "the function's name", "arguments": {{"its": "arguments"}}}}
{close}
What it returns comes with the next message."""


def with_objects(messages: Sequence[Any]) -> list[Any]:
    """The same messages, with the arguments of calls as objects where they are texts."""
    return [_with_objects(message) for message in messages]


def _with_objects(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # cut short, or no JSON: the template writes the text
    return {**call, "function": {**function, "arguments": arguments}}


def with_thoughts(messages: Sequence[Any], has_channels: bool) -> list[Any]:
    """The same messages, with thoughts under the names that templates have for them."""
    named = _for_channels if has_channels else _by_both_names
    return [named(each) if _role(each) == "assistant" else each for each in messages]


def _for_channels(message: Message) -> Message:
    """gpt-oss's template takes them of messages that call, and only where these have no words."""
    if message.get("content") or "thinking" in message:
        return message
    thoughts = _thoughts(message)
    return {**message, "thinking": thoughts} if thoughts else message


def _by_both_names(message: Message) -> Message:
    """A message may have been cut within its thoughts, and have nothing else."""
    thoughts = _thoughts(message)
    if thoughts is None:
        return message
    named = {**message, "reasoning_content": thoughts, "reasoning": thoughts}
    if named.get("content") is None and not named.get("tool_calls"):
        named["content"] = ""
    return named


def _thoughts(message: Message) -> str | None:
    given = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((each for each in given if isinstance(each, str) and each), None)


def in_words(messages: Sequence[Any], tools: Sequence[Tool]) -> list[Any]:
    """For a template that knows neither tools nor calls."""
    written: list[Any] = []
    for role, group in groupby(messages, key=_role):
        if role == "tool":  # of one turn: several messages of one role would confuse templates
            results = [f"<tool_response>\n{_text(each)}\n</tool_response>" for each in group]
            written.append({"role": "user", "content": "\n".join(results)})
        else:
            written += [_calls_as_text(message) for message in group]
    return _explained(written, tools) if tools else written


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _explained(messages: list[Any], tools: Sequence[Tool]) -> list[Any]:
    lines = "\n".join(json.dumps(tool.given, ensure_ascii=False) for tool in tools)
    text = EXPLANATION.format(tools=lines, open=OPEN, close=CLOSE)
    first = messages[0] if messages else {}
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        return [{**first, "content": f"{_text(first)}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calls_as_text(message: Any) -> Any:
    if _role(message) != "assistant" or not message.get("tool_calls"):
        return message
    texts = [_text(message)]
    for call in with_objects([message])[0]["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            plain = {name: function.get(name) for name in ("name", "arguments")}
            texts.append(f"{OPEN}\n{json.dumps(plain, ensure_ascii=False)}\n{CLOSE}")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, texts))}


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(part for part in parts if isinstance(part, str))
