"""The output items of a response, and the events of a stream that tell how each comes to be.

response.output_item.added
  response.content_part.added           of words and thoughts
    response.output_text.delta …        or reasoning_text, function_call_arguments, …
    response.output_text.done
  response.content_part.done
response.output_item.done
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.api.server.responses.items import Item, new_id
from quire.api.tools.events import CallArguments, CallBegins, Event, Text

StreamEvent = dict[str, Any]
Logprobs = list[dict[str, Any]]  # of tokens, as chats write them


class OutputWriter:
    """`push` what the model says as it comes, then `end`. `items` are those that have ended."""

    def __init__(
        self,
        new_call_id: Callable[[], str],
        thoughts_as_summary: bool = False,
        namespaces: Mapping[str, str] | None = None,
    ) -> None:
        """`namespaces` are those of tools that have one, by the name that the model knows."""
        self.items: list[Item] = []
        self._open: _OpenItem | None = None
        self._pending: Logprobs = []  # of tokens whose text has not been said yet
        self._new_call_id = new_call_id
        self._namespaces = namespaces or {}
        self._thought = _Summary if thoughts_as_summary else _Thought

    def push(
        self, events: Iterable[Event], logprobs: Iterable[dict[str, Any]] = ()
    ) -> list[StreamEvent]:
        """With `logprobs`, those of one token; in the end, those of words alone are kept."""
        self._pending += logprobs
        told: list[StreamEvent] = []
        for event in events:
            told += self._begin_for(event)
            assert self._open is not None
            if not isinstance(event, CallBegins):
                is_words = isinstance(event, Text)
                told += self._open.push(event.text, self._pending if is_words else [])
            self._pending = []
        return told

    def so_far(self) -> list[Item]:
        """The items that have ended, and the one that is being said, with its text up to here."""
        return self.items if self._open is None else [*self.items, self._open.so_far()]

    def end(self, status: str) -> list[StreamEvent]:
        """The last item has this status. A whole answer that says nothing is an empty message."""
        told: list[StreamEvent] = []
        if self._open is None and not self.items and status == "completed":
            told += self._begin(_Words(0))
        return told + self._close(status)

    def _begin_for(self, event: Event) -> list[StreamEvent]:
        """Begin an item, unless `event` goes on with the one that is open."""
        index = len(self.items) + (self._open is not None)
        if isinstance(event, CallBegins):
            kind = _CustomCall if event.is_custom else _Call
            namespace = self._namespaces.get(event.name)
            return self._begin(kind(index, event.name, self._new_call_id(), namespace))
        other = _Words if isinstance(event, Text) else self._thought
        if isinstance(event, CallArguments) or isinstance(self._open, other):
            return []
        return self._begin(other(index))

    def _begin(self, item: _OpenItem) -> list[StreamEvent]:
        told = self._close("completed")
        self._open = item
        return told + item.begin()

    def _close(self, status: str) -> list[StreamEvent]:
        if self._open is None:
            return []
        told = self._open.end(status)
        self.items.append(self._open.item)
        self._open = None
        return told


class _OpenItem(ABC):
    """An item that grows by pieces of text."""

    kind: str  # the item's type
    texts: str  # events about its text have this in their type

    def __init__(self, index: int, **fields: Any) -> None:
        self._index = index
        self._pieces: list[str] = []
        self._logprobs: Logprobs = []
        self.item: Item = {
            "id": new_id(self.kind),
            "type": self.kind,
            "status": "in_progress",
            **fields,
        }

    def begin(self) -> list[StreamEvent]:
        added = {"type": "response.output_item.added", "output_index": self._index}
        return [{**added, "item": dict(self.item)}, *self._part_events("added", self._part(""))]

    def push(self, text: str, logprobs: Logprobs) -> list[StreamEvent]:
        self._pieces.append(text)
        self._logprobs += logprobs
        return [self._event(f"{self.texts}.delta", **self._place(), delta=text)]

    def so_far(self) -> Item:
        text = "".join(self._pieces)
        return {**self.item, **self._filled(text, self._part(text))}

    def end(self, status: str) -> list[StreamEvent]:
        text = "".join(self._pieces)
        part = self._part(text)
        self.item |= {"status": status, **self._filled(text, part)}
        done = {"type": "response.output_item.done", "output_index": self._index}
        return [
            self._event(f"{self.texts}.done", **self._place(), **self._said(text)),
            *self._part_events("done", part),
            {**done, "item": self.item},
        ]

    @abstractmethod
    def _filled(self, text: str, part: dict[str, Any]) -> dict[str, Any]:
        """The item's fields that hold its text."""

    def _part(self, text: str) -> dict[str, Any]:
        """Its one part; empty for an item that has none."""
        return {}

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0}

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _part_events(self, which: str, part: dict[str, Any]) -> list[StreamEvent]:
        return [self._event(f"content_part.{which}", **self._place(), part=part)]

    def _event(self, name: str, /, **fields: Any) -> StreamEvent:
        item = {"item_id": self.item["id"], "output_index": self._index}
        return {"type": f"response.{name}", **item, **fields}


class _Words(_OpenItem):
    kind, texts = "message", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index, role="assistant", content=[])

    def push(self, text: str, logprobs: Logprobs) -> list[StreamEvent]:
        [delta] = super().push(text, logprobs)
        return [{**delta, "logprobs": logprobs}]

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs}

    def _part(self, text: str) -> dict[str, Any]:
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _filled(self, text: str, part: dict[str, Any]) -> dict[str, Any]:
        return {"content": [part]}


class _Thought(_OpenItem):
    kind, texts = "reasoning", "reasoning_text"

    def __init__(self, index: int) -> None:
        super().__init__(index, summary=[], content=[], encrypted_content=None)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def _filled(self, text: str, part: dict[str, Any]) -> dict[str, Any]:
        return {"content": [part]}


class _Summary(_Thought):
    """Thoughts where a summary is asked for: they are their own, at full length."""

    texts = "reasoning_summary_text"

    def _place(self) -> dict[str, Any]:
        return {"summary_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text", "text": text}

    def _filled(self, text: str, part: dict[str, Any]) -> dict[str, Any]:
        return {"summary": [part]}

    def _part_events(self, which: str, part: dict[str, Any]) -> list[StreamEvent]:
        return [self._event(f"reasoning_summary_part.{which}", **self._place(), part=part)]


class _Call(_OpenItem):
    kind, texts = "function_call", "function_call_arguments"

    given = "arguments"  # the field of what is given to the tool

    def __init__(self, index: int, name: str, call_id: str, namespace: str | None = None) -> None:
        fields = {"name": name, "call_id": call_id, self.given: ""}
        if namespace is not None:
            fields |= {"namespace": namespace, "name": name.removeprefix(f"{namespace}.")}
        super().__init__(index, **fields)

    def _place(self) -> dict[str, Any]:
        return {}

    def _said(self, text: str) -> dict[str, Any]:
        return {"name": self.item["name"], "arguments": text}

    def _part_events(self, which: str, part: dict[str, Any]) -> list[StreamEvent]:
        return []

    def _filled(self, text: str, part: dict[str, Any]) -> dict[str, Any]:
        return {self.given: text}


class _CustomCall(_Call):
    kind, texts, given = "custom_tool_call", "custom_tool_call_input", "input"

    def _said(self, text: str) -> dict[str, Any]:
        return {"input": text}
