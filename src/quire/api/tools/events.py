"""What a message is made of, as it comes in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Text:
    """Words for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Thoughts, which some models write before their words and calls."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    index: int
    name: str
    is_custom: bool = False  # what follows is the text of an input, and no JSON


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments, which together are JSON if the model wrote JSON."""

    index: int
    text: str


Event = Text | Reasoning | CallBegins | CallArguments


@dataclass
class Call:
    name: str
    arguments: str = ""
    is_custom: bool = False


@dataclass
class ParsedMessage:
    """All events of a message together."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    reasoning: str = ""

    @classmethod
    def of(cls, events: Iterable[Event]) -> ParsedMessage:
        message = cls()
        for event in events:
            if isinstance(event, Text):
                message.text += event.text
            elif isinstance(event, Reasoning):
                message.reasoning += event.text
            elif isinstance(event, CallBegins):
                message.calls.append(Call(event.name, is_custom=event.is_custom))
            else:
                message.calls[event.index].arguments += event.text
        return message
