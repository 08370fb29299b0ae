"""OpenAI's custom tools, whose input is a text of any form, or of a grammar.

Models know functions alone: to them a custom tool is one with a single parameter, the text, and a
call of it is read back as that text. A call that is demanded of a tool with a grammar is written
without any of this: the answer itself is the input, held to the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.api.tools.events import CallArguments, CallBegins, Event, Text
from quire.errors import RequestError
from quire.structured import StructuredOutput

CUSTOM, INPUT = "custom", "input"
SYNTAXES = ("lark", "regex")
HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # of surrogates
ESCAPE = re.compile(PAIR + r"|\\u[0-9a-fA-F]{4}|\\u|\\[^u]", re.DOTALL)
# A JSON string's characters, as far as they are whole. What may still become a pair or a number is
# not; what cannot any more is taken as it stands: models write paths and patterns unescaped, too.
WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|' + PAIR + r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
    r"|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))*",
    re.DOTALL,
)


@dataclass(frozen=True)
class InputFormat:
    """What the input of a custom tool may be; any text without a syntax."""

    syntax: str | None = None
    definition: str = ""

    @classmethod
    def read(cls, where: str, given: Any) -> InputFormat:
        kind = given.get("type") if isinstance(given, Mapping) else None
        if given is None or kind == "text":
            return cls()
        grammar = given.get("grammar") if isinstance(given, Mapping) else None
        syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
        definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
        if kind != "grammar" or syntax not in SYNTAXES or not isinstance(definition, str):
            raise RequestError(
                f"{where} needs a format of the type 'text', or 'grammar' with a grammar: its "
                "syntax, 'lark' or 'regex', and definition."
            )
        found = cls(syntax, definition)
        found.form()
        return found

    def form(self) -> StructuredOutput | None:
        if self.syntax is None:
            return None
        if self.syntax == "regex":
            return StructuredOutput(regex=self.definition)
        return StructuredOutput(grammar=self.definition)

    def function(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The tool `given`, as the function that a model is shown."""
        text: dict[str, Any] = {"type": "string"}
        if self.syntax == "regex":
            text["pattern"] = f"^(?:{self.definition})$"
        elif self.syntax == "lark":
            text["description"] = f"A text of this Lark grammar:\n{self.definition}"
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        shown = {name: given[name] for name in ("name", "description") if name in given}
        return {**shown, "parameters": {**parameters, "additionalProperties": False}}


def as_function_calls(messages: Sequence[Any]) -> list[Any]:
    """The same conversation, with calls of custom tools as the model has written them."""
    return [_with_functions(message) for message in messages]


def _with_functions(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_as_function(call) for call in calls]}


def _as_function(call: Any) -> Any:
    made = call.get(CUSTOM) if isinstance(call, Mapping) else None
    if not isinstance(made, Mapping):
        return call
    if not all(isinstance(made.get(name), str) for name in ("name", INPUT)):
        raise RequestError("A call of a custom tool has a name and an input, which are texts.")
    kept = {name: value for name, value in call.items() if name != CUSTOM}
    return {**kept, "type": "function", "function": function_call(made.get("name"), made)}


def function_call(name: Any, made: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": json.dumps({INPUT: made.get(INPUT)}, ensure_ascii=False)}


class CustomCalls:
    """Turns the events of one answer: what is said to a custom tool is its input alone."""

    def __init__(self, names: Collection[str], demanded: str | None = None) -> None:
        """Of a tool that is `demanded` by name, the words of an answer are the input."""
        self._names = names
        self._demanded = demanded
        self._reader: InputReader | None = None
        self._index = 0  # of the call that is read
        self.has_called = False  # the one that was demanded

    def read(self, events: Iterable[Event], is_last: bool) -> list[Event]:
        found = [each for event in events for each in self._read(event)]
        return found + self._end() if is_last else found

    def _read(self, event: Event) -> list[Event]:
        if self._demanded is not None and isinstance(event, Text):
            begins = [] if self.has_called else [CallBegins(0, self._demanded, is_custom=True)]
            self.has_called = True
            return [*begins, CallArguments(0, event.text)]
        if isinstance(event, CallArguments) and self._reader is not None:
            return self._said(self._reader.push(event.text))
        ended = self._end()
        if isinstance(event, CallBegins) and event.name in self._names:
            self._reader, self._index = InputReader(), event.index
            event = replace(event, is_custom=True)
        return [*ended, event]

    def _end(self) -> list[Event]:
        reader, self._reader = self._reader, None
        return [] if reader is None else self._said(reader.flush())

    def _said(self, text: str) -> list[Event]:
        return [CallArguments(self._index, text)] if text else []


def _unescaped(escape: re.Match[str]) -> str:
    """What an escape of JSON stands for; the same text, if it is none."""
    try:
        said: str = json.loads(f'"{escape[0]}"')
    except ValueError:
        return escape[0]
    # Half a pair of surrogates is no character.
    return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class InputReader:
    """From a call's arguments, `{"input": "…"}` in pieces, to the text."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False

    def push(self, text: str) -> str:
        self._held += text
        if not self._has_begun:
            head = HEAD.match(self._held)
            if head is None:
                return ""
            self._has_begun, self._held = True, self._held[head.end() :]
        whole = WHOLE.match(self._held)
        assert whole is not None
        self._held = self._held[whole.end() :]
        return ESCAPE.sub(_unescaped, whole[0])

    def flush(self) -> str:
        """No more comes: of arguments that are something else, what may be meant."""
        if self._has_begun:
            return ""
        try:
            given = json.loads(self._held)
        except (ValueError, RecursionError):
            return self._held
        texts = [*given.values()] if isinstance(given, dict) else [given]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else self._held
