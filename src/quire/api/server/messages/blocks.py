"""An answer in content blocks: each begins, grows by deltas and stops, one behind the other.

The whole answer is what the deltas of the same events give together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import from_json

from quire.api.tools.events import CallArguments, CallBegins, Event, Reasoning, Text

StreamEvent = dict[str, Any]


class BlockWriter:
    """`push` an answer's events as they come, then `close`."""

    def __init__(self, new_id: Callable[[], str], *, shows_thoughts: bool = True) -> None:
        """Without `shows_thoughts`, a block of thoughts is empty, but it is there."""
        self._new_id = new_id
        self._shows_thoughts = shows_thoughts
        self._open: tuple[str, int] | None = None  # its type and, of a call, which
        self._index = -1
        self._digest = hashlib.sha256()

    def push(self, events: Iterable[Event]) -> list[StreamEvent]:
        return [written for event in events for written in self._write(event)]

    def close(self) -> list[StreamEvent]:
        """The end of the block that is open."""
        if self._open is None:
            return []
        last = []
        if self._open[0] == "thinking":
            # It vouches for nothing; clients send back only thoughts that have one.
            last = [self._delta({"type": "signature_delta", "signature": self._digest.hexdigest()})]
        self._open = None
        return [*last, {"type": "content_block_stop", "index": self._index}]

    def _write(self, event: Event) -> list[StreamEvent]:
        begun = self._begin(event)
        if isinstance(event, Text):
            return [*begun, self._delta({"type": "text_delta", "text": event.text})]
        if isinstance(event, CallArguments):
            delta = {"type": "input_json_delta", "partial_json": event.text}
            return [*begun, self._delta(delta)]
        if isinstance(event, Reasoning):
            self._digest.update(event.text.encode(errors="surrogatepass"))
            if self._shows_thoughts:
                delta = {"type": "thinking_delta", "thinking": event.text}
                return [*begun, self._delta(delta)]
        return begun

    def _begin(self, event: Event) -> list[StreamEvent]:
        """The beginning of the event's block, and the end of the one before it."""
        block: dict[str, Any]
        if isinstance(event, Text):
            key, block = ("text", 0), {"type": "text", "text": ""}
        elif isinstance(event, Reasoning):
            key, block = ("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""}
        else:
            key = ("tool_use", event.index)
            name = event.name if isinstance(event, CallBegins) else ""
            block = {"type": "tool_use", "id": "", "name": name, "input": {}}
        if key == self._open:
            return []
        if key[0] == "tool_use":
            block["id"] = self._new_id()
        ended = self.close()
        self._open, self._index = key, self._index + 1
        self._digest = hashlib.sha256()
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ended, begun]

    def _delta(self, delta: dict[str, Any]) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def whole_blocks(events: Iterable[StreamEvent]) -> list[dict[str, Any]]:
    """The content that a stream's events make, as its client puts it together."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            index, delta = event["index"], event["delta"]
            if "partial_json" in delta:
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[index][name] += delta[name]
    for index, text in arguments.items():
        blocks[index]["input"] = _parsed(text)
    return blocks


def _parsed(arguments: str) -> dict[str, Any]:
    """A call's arguments; of one that was cut off, as many as are whole."""
    try:
        parsed = from_json(arguments, allow_partial=True)
    except ValueError:
        parsed = None
    # What is no JSON goes under the name that Anthropic's documents have for it.
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}
