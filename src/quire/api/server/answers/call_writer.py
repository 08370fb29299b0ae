"""One choice's thoughts, words and calls, as OpenAI's chats write them."""

from __future__ import annotations

from typing import Any

from quire.api.reasoning.token_count import ThoughtCounter
from quire.api.server.answers.choices import Delta
from quire.api.tools.custom import CUSTOM, INPUT, CustomCalls
from quire.api.tools.events import (
    CallArguments,
    CallBegins,
    Event,
    ParsedMessage,
    Reasoning,
    Text,
)
from quire.api.tools.formats import ToolFormat
from quire.api.tools.parser import AnswerParser


class CallWriter:
    """Reads the text of one choice.

    Without `may_call`, what the model writes as a call's arguments is words; without
    `shows_thoughts`, its thoughts are left out.
    """

    def __init__(
        self,
        parser: AnswerParser,
        tool_format: ToolFormat,
        *,
        may_call: bool = True,
        shows_thoughts: bool = True,
        counter: ThoughtCounter | None = None,
        custom: CustomCalls | None = None,
    ) -> None:
        """`custom` reads calls of custom tools."""
        self._parser, self._format = parser, tool_format
        self._custom = custom
        self._may_call, self._shows_thoughts = may_call, shows_thoughts
        self._counter = counter
        self._is_custom = False  # the call that is written

    @property
    def reasoning_tokens(self) -> int | None:
        return None if self._counter is None else self._counter.count

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.has_called else reason

    @property
    def has_called(self) -> bool:
        has_called = self._custom is not None and self._custom.has_called
        return self._may_call and (self._parser.num_calls > 0 or has_called)

    def message(self, delta: Delta) -> dict[str, Any]:
        """A whole message's content and calls."""
        parsed = ParsedMessage.of(self.events(delta))
        thoughts = reasoning(parsed.reasoning or None) if self._shows_thoughts else {}
        if not parsed.calls:
            return {"content": parsed.text, **thoughts}
        calls = [
            {"id": self._format.new_id(), **_call(call.is_custom, call.name, call.arguments)}
            for call in parsed.calls
        ]
        return {"content": parsed.text or None, **thoughts, "tool_calls": calls}

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """The new pieces of a message."""
        return [self._delta(event) for event in self.events(delta)]

    def events(self, delta: Delta) -> list[Event]:
        """What the new text says; with the last of it, what was held back, too."""
        if self._counter is not None:
            self._counter.push(delta.token_ids)
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.flush(delta.is_cut)
        if not self._shows_thoughts:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._may_call and self._custom is not None:
            return self._custom.read(events, delta.finish_reason is not None)
        if self._may_call:
            return events
        said = (event for event in events if not isinstance(event, CallBegins))
        return [Text(each.text) if isinstance(each, CallArguments) else each for each in said]

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return reasoning(event.text)
        call: dict[str, Any] = {"index": event.index}
        if isinstance(event, CallBegins):
            self._is_custom = event.is_custom
            call |= {"id": self._format.new_id(), **_call(event.is_custom, event.name, "")}
        else:
            call |= _more_of_call(self._is_custom, event.text)
        return {"tool_calls": [call]}


class FunctionCallWriter(CallWriter):
    """The same with one call, as `function_call`: what answers had before there were tools."""

    def finish_reason(self, reason: str | None) -> str | None:
        found = super().finish_reason(reason)
        return "function_call" if found == "tool_calls" else found

    def message(self, delta: Delta) -> dict[str, Any]:
        return _as_function_call(super().message(delta))

    def _delta(self, event: Event) -> dict[str, Any]:
        return _as_function_call(super()._delta(event))


def _call(is_custom: bool, name: str, arguments: str) -> dict[str, Any]:
    if is_custom:
        return {"type": CUSTOM, CUSTOM: {"name": name, INPUT: arguments}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _more_of_call(is_custom: bool, text: str) -> dict[str, Any]:
    return {CUSTOM: {INPUT: text}} if is_custom else {"function": {"arguments": text}}


def _as_function_call(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.pop("tool_calls", None)
    return {**message, "function_call": calls[0]["function"]} if calls else message


def reasoning(text: str | None) -> dict[str, str | None]:
    """Under the two names that clients know: that of DeepSeek's API, and that of OpenRouter's."""
    return {"reasoning_content": text, "reasoning": text}
