"""What one chat does with tools: before it, the prompt and the form; after it, the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.api.server.answers.choices import Delta
from quire.api.tools.conversation import in_words, with_objects, with_thoughts
from quire.api.tools.definitions import Tool, ToolChoice, choose_tools, read_tools
from quire.api.tools.events import (
    CallArguments,
    CallBegins,
    Event,
    ParsedMessage,
    Reasoning,
    Text,
)
from quire.api.tools.forced import final_answer, forced_calls, is_json
from quire.api.tools.formats import ToolFormat, choose_format
from quire.api.tools.parser import AnswerParser
from quire.models.text.chat_template import takes_tools
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams

Messages = list[dict[str, Any]]


@dataclass
class ToolUse:
    """`is_on` where the model may call."""

    tokenizer: Tokenizer | None
    tool_format: ToolFormat
    tools: Sequence[Tool]
    choice: ToolChoice
    several: bool  # calls in one message
    _writers: dict[int, CallWriter] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        tokenizer: Tokenizer | None,
        setting: str,
        tools: Any,
        choice: Any,
        several: bool | None,
    ) -> ToolUse:
        template = tokenizer.chat_template if tokenizer is not None else None
        tool_format = choose_format(template, setting)
        return cls(
            tokenizer, tool_format, *choose_tools(choice, read_tools(tools)), several is not False
        )

    @property
    def is_on(self) -> bool:
        return self.choice.kind != "none"

    @property
    def reads_answers(self) -> bool:
        """Whether texts are more than words: with calls, or in channels."""
        return self.is_on or self.tool_format.has_channels

    def conversation(
        self, messages: Messages, variables: dict[str, Any]
    ) -> tuple[Messages, dict[str, Any]]:
        """Messages and variables for the chat template."""
        if self.tool_format.has_channels:
            messages = with_thoughts(messages)
        tools = self.tools if self.is_on else ()
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        if not takes_tools(template or ""):
            return in_words(messages, tools), variables
        if tools:
            variables = {**variables, "tools": [tool.given for tool in tools]}
        return with_objects(messages), variables

    def params(self, params: SamplingParams) -> SamplingParams:
        """`params` with a grammar that enforces a call, where the request demands one.

        Where the model may choose and the answer must be JSON, the grammar allows either.
        """
        if not self.reads_answers or self.tokenizer is None:
            return params
        if self.tool_format.shows_special(self.tokenizer):
            params = replace(params, skip_special_tokens=False)
        answer = None if self.choice.is_forced else params.structured
        if not (self.choice.is_forced or (answer is not None and is_json(answer))):
            return params
        if not self.is_on:
            assert answer is not None
            form = final_answer(answer, self.tool_format, self.tokenizer)
            return replace(params, structured=form)
        form = forced_calls(
            [tool for tool in self.tools if self.choice.name in (None, tool.name)],
            self.tool_format,
            self.tokenizer,
            several=self.several and self.choice.name is None,
            answer=answer,
        )
        return replace(params, structured=form)

    def events(self, delta: Delta) -> list[Event]:
        """What a choice's new text says: words, thoughts, pieces of calls."""
        if not self.reads_answers:
            return [Text(delta.text)] if delta.text else []
        is_last = delta.finish_reason is not None
        return self.writer(delta.index).events(delta.text, is_last, delta.is_cut)

    def writer(self, index: int) -> CallWriter:
        """Writes the calls of one choice."""
        if index not in self._writers:
            only_one = not self.several
            self._writers[index] = CallWriter(self.tool_format, only_one, self.is_on)
        return self._writers[index]


class CallWriter:
    """The thoughts, words and calls in one choice's text, as OpenAI writes them.

    Without `may_call`, what the model writes as a call's arguments is words.
    """

    def __init__(self, tool_format: ToolFormat, only_one: bool, may_call: bool = True) -> None:
        self._format, self._may_call = tool_format, may_call
        self._parser: AnswerParser = tool_format.parser(only_one)

    def finish_reason(self, reason: str | None) -> str | None:
        has_called = self._may_call and self._parser.num_calls
        return "tool_calls" if reason == "stop" and has_called else reason

    def message(self, text: str, is_cut: bool = False) -> dict[str, Any]:
        """A whole message's content and calls; `is_cut` where more would have come."""
        parsed = ParsedMessage.of(self.events(text, True, is_cut))
        thoughts = reasoning(parsed.reasoning) if parsed.reasoning else {}
        if not parsed.calls:
            return {"content": parsed.text, **thoughts}
        calls = [
            {
                "id": self._format.new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
        return {"content": parsed.text or None, **thoughts, "tool_calls": calls}

    def deltas(self, text: str, is_last: bool, is_cut: bool = False) -> list[dict[str, Any]]:
        """The new pieces of calls, now that `text` has come."""
        return [self._delta(event) for event in self.events(text, is_last, is_cut)]

    def events(self, text: str, is_last: bool, is_cut: bool) -> list[Event]:
        """What `text` says, now that it has come; with the last of it, what was held back, too."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.flush(is_cut)
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
            call |= {"id": self._format.new_id(), "type": "function"}
            call["function"] = {"name": event.name, "arguments": ""}
        else:
            call["function"] = {"arguments": event.text}
        return {"tool_calls": [call]}


def reasoning(text: str) -> dict[str, str]:
    """Under the two names that clients know: that of DeepSeek's API, and that of OpenRouter's."""
    return {"reasoning_content": text, "reasoning": text}
