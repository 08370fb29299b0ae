"""A conversation as Anthropic writes it, in content blocks, becomes one for chat templates.

    system                       a message of the system
    text                         the content of its message
    thinking                     the message's reasoning; what is redacted cannot be read
    tool_use                     a call of the assistant's
    tool_result                  a message of the tool

Messages of one role in a row are one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from quire.errors import RequestError

Message = dict[str, Any]

NAMED = {"image": "images", "document": "documents", "search_result": "search results"}
# A coding agent sends this line as a block of the system's text. Its checksum differs with every
# request, so that no prompt would begin like the one before; it says nothing to a model.
BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True)
class Block:
    where: str  # in the request, for errors
    given: Mapping[str, Any]

    @property
    def kind(self) -> Any:
        return self.given.get("type")

    def field(self, name: str, kind: type, what: str) -> Any:
        value = self.given.get(name)
        if not isinstance(value, kind):
            raise RequestError(f"{self.where} needs {name}, which is {what}.")
        return value

    @property
    def text(self) -> str:
        return str(self.field("text", str, "a text"))

    def refused(self, taken: str) -> RequestError:
        kind = self.kind
        if isinstance(kind, str) and kind in NAMED:
            return RequestError(
                f"{self.where} has the type {kind!r}: {NAMED[kind]} are not supported by this "
                "server; send text."
            )
        shown = str(kind)[:64]
        return RequestError(f"{self.where} has the type {shown!r}; {taken} can be sent here.")


def chat_messages(system: Any, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    turns = [] if system is None else _system(_blocks("system", system))
    placed = [(_role(i, each), i, each.get("content")) for i, each in enumerate(messages)]
    for role, group in groupby(placed, key=lambda item: item[0]):
        blocks = [
            block for _, i, content in group for block in _blocks(f"messages[{i}].content", content)
        ]
        turns += READERS[role](blocks)
    if turns and turns[-1].get("tool_calls"):
        raise RequestError("The last message has tool_use; send its tool_result behind it.")
    return turns


def ends_open(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the assistant's, which the answer then goes on with."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def _role(index: int, message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in READERS:
        raise RequestError(f"messages[{index}] needs a role, which is 'user' or 'assistant'.")
    return role


def _blocks(where: str, content: Any) -> list[Block]:
    if isinstance(content, str):
        return [Block(where, {"type": "text", "text": content})]
    if not isinstance(content, Sequence) or not all(isinstance(each, Mapping) for each in content):
        raise RequestError(f"{where} must be a text or a list of content blocks.")
    return [Block(f"{where}[{i}]", each) for i, each in enumerate(content)]


def _text(blocks: Iterable[Block]) -> str:
    texts = []
    for block in blocks:
        if block.kind != "text":
            raise block.refused("only text")
        texts.append(block.text)
    return "\n".join(texts)


def _system(blocks: list[Block]) -> list[Message]:
    said = [block for block in blocks if block.kind != "text" or not block.text.startswith(BILLING)]
    return [{"role": "system", "content": _text(said)}] if said else []


def _user(blocks: list[Block]) -> list[Message]:
    turns: list[Message] = []
    for is_result, group in groupby(blocks, key=lambda block: block.kind == "tool_result"):
        if is_result:
            turns += [_result(block) for block in group]
        else:
            turns.append({"role": "user", "content": _text(group)})
    return turns


def _result(block: Block) -> Message:
    content = block.given.get("content")
    text = "" if content is None else _text(_blocks(f"{block.where}.content", content))
    if block.given.get("is_error"):  # templates know no other way to say so
        text = f"Error: {text}"
    name = block.field("tool_use_id", str, "the id of a tool_use")
    return {"role": "tool", "tool_call_id": name, "content": text}


def _assistant(blocks: list[Block]) -> list[Message]:
    said = [block for block in blocks if block.kind not in ("thinking", "redacted_thinking")]
    thoughts = [
        block.field("thinking", str, "a text") for block in blocks if block.kind == "thinking"
    ]
    calls = [_call(block) for block in said if block.kind == "tool_use"]
    text = _text(block for block in said if block.kind != "tool_use")
    message: Message = {"role": "assistant", "content": text or (None if calls else "")}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: Block) -> Message:
    arguments = block.field("input", Mapping, "an object")
    function = {"name": block.field("name", str, "a tool's name"), "arguments": arguments}
    return {
        "id": block.field("id", str, "a text"),
        "type": "function",
        "function": function,
    }


READERS = {"user": _user, "assistant": _assistant, "system": _system}
