"""Items, which a conversation of the Responses API is made of, and the messages they stand for.

reasoning, message, function_call, custom_tool_call …    one message of the assistant
function_call_output, custom_tool_call_output            a message of the role `tool`
message of any other role                                the same message
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.api.server.errors import bad_request
from quire.api.server.responses.tools import name_for_model
from quire.api.tools.custom import function_call

Item = dict[str, Any]
Message = dict[str, Any]

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
CUSTOM_CALL = "custom_tool_call"
RESULTS = ("function_call_output", "custom_tool_call_output")
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", CUSTOM_CALL: "ctc"}
REFERENCE = "item_reference"
# The keys of a part's text, by the part's type.
PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


def new_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


def read_input(given: Any, find: Callable[[str], Item], name: str = "input") -> list[Item]:
    """The items of a request, checked, each with a type and an id; `find` looks up references."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_request(f"{name} must be a text or a list of items.", param=name)
    if len(given) > MAX_ITEMS:
        raise bad_request(f"{name} has {len(given):,} items; send at most {MAX_ITEMS:,}.", name)
    return [_read_item(f"{name}[{i}]", each, find) for i, each in enumerate(given)]


def _read_item(where: str, item: Any, find: Callable[[str], Item]) -> Item:
    if not isinstance(item, Mapping):
        raise _bad(where, "must be an item, which is an object with a type")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == REFERENCE or (kind is None and set(item) == {"id"}):
        return find(_text_of(where, item, "id"))
    if not isinstance(kind, str) or kind not in READERS:
        known = ", ".join(READERS)
        raise _bad(where, f"is of the type {str(kind)[:64]!r}; the types known here are {known}")
    named = item.get("id")
    given = named if isinstance(named, str) and named else new_id(kind)
    return {**READERS[kind](where, item), "type": kind, "id": given}


def _read_message(where: str, item: Mapping[str, Any]) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise _bad(where, f"needs a role: {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    _check_parts(f"{where}.content", content)
    return {**item, "content": content, "status": item.get("status") or "completed"}


def _read_call(where: str, item: Mapping[str, Any]) -> Item:
    for name in ("call_id", "name", "arguments"):
        _text_of(where, item, name)
    return {**item, "status": item.get("status") or "completed"}


def _read_custom_call(where: str, item: Mapping[str, Any]) -> Item:
    for name in ("call_id", "name", "input"):
        _text_of(where, item, name)
    return dict(item)


def _read_result(where: str, item: Mapping[str, Any]) -> Item:
    _text_of(where, item, "call_id")
    if not isinstance(item.get("output"), str):
        _check_parts(f"{where}.output", item.get("output"))
    return dict(item)


def _read_thought(where: str, item: Mapping[str, Any]) -> Item:
    for name in ("content", "summary"):
        if item.get(name) is not None:
            _check_parts(f"{where}.{name}", item[name])
    return {**item, "summary": item.get("summary") or []}


READERS: Mapping[str, Callable[[str, Mapping[str, Any]], Item]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_result,
    CUSTOM_CALL: _read_custom_call,
    "custom_tool_call_output": _read_result,
    "reasoning": _read_thought,
}


def _check_parts(where: str, parts: Any) -> None:
    if not isinstance(parts, list):
        raise _bad(where, "must be a text or a list of parts")
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in PARTS:
            says = f"is of the type {str(kind)[:64]!r}; this model reads text alone"
            raise _bad(f"{where}[{i}]", says)
        _text_of(f"{where}[{i}]", part, PARTS[kind])


def _text_of(where: str, item: Mapping[str, Any], name: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise _bad(where, f"needs {name}, which is a text")
    return text


def _bad(where: str, says: str) -> Exception:
    return bad_request(f"{where} {says}.", param=where.partition("[")[0])


def as_messages(items: Iterable[Item]) -> list[Message]:
    """The conversation for a chat template; what the assistant did in one turn is one message."""
    messages: list[Message] = []
    for item in items:
        kind = item["type"]
        if kind in RESULTS:
            message = {"role": "tool", "tool_call_id": item["call_id"]}
            messages.append({**message, "content": _chat_content(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _chat_content(item["content"])})
        elif kind == "message":
            turn = _turn(messages, is_open=_has_no_words)
            turn["content"] = (turn["content"] or "") + _text(item["content"])
        elif kind == "reasoning":
            if thoughts := _text(item.get("content") or item["summary"]):
                _turn(messages, is_open=lambda turn: False)["reasoning_content"] = thoughts
        else:
            name = name_for_model(item.get("namespace"), item["name"])
            function = {"name": name, "arguments": item.get("arguments")}
            if kind == CUSTOM_CALL:
                function = function_call(name, item)
            call = {"id": item["call_id"], "type": "function", "function": function}
            _turn(messages, is_open=lambda turn: True).setdefault("tool_calls", []).append(call)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # thoughts alone: the answer was cut
    return messages


def _turn(messages: list[Message], is_open: Callable[[Message], bool]) -> Message:
    """The assistant's message that an item belongs to: the last one, if it `is_open` for it."""
    if not (messages and messages[-1]["role"] == "assistant" and is_open(messages[-1])):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _has_no_words(turn: Message) -> bool:
    """Or has called already: words behind a call are of the same turn."""
    return turn["content"] is None or "tool_calls" in turn


def _chat_content(content: str | list[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Text, or text parts as chats have them."""
    if isinstance(content, str):
        return content
    texts = [part[PARTS[part["type"]]] for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(parts: list[Mapping[str, Any]]) -> str:
    return "\n".join(part[PARTS[part["type"]]] for part in parts)
