"""From a model's text to words and calls, as it comes; no matter how it is cut into pieces.

Text that may yet turn out to be a tag, or to stand before one, is held back until that is known.
White space between words and calls is dropped. Where a text is cut off, what may be the beginning
of a call is not said at all; where it ends by itself, a call that is none is words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.api.tools.call_reader import CallReader
from quire.api.tools.events import CallArguments, CallBegins, Event, ParsedMessage, Text


class AnswerParser(ABC):
    """`push` text, then `flush`. The same text in other pieces gives the same message."""

    tags: tuple[str, ...]  # each begins or ends something other than words
    inner_tags: tuple[str, ...] = ()  # these stand only inside of it

    def __init__(self, only_one: bool = False) -> None:
        """With `only_one`, calls behind the first are left out."""
        self.num_calls = 0
        self._only_one = only_one
        self._buffer = ""
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        while self._advance():
            pass
        return self._take()

    @abstractmethod
    def flush(self, is_cut: bool = False) -> list[Event]:
        """What was held back, now that no more text comes; `is_cut` if more would have come."""

    @abstractmethod
    def _advance(self) -> bool:
        """Do the next thing that the buffer allows; False if it must grow first."""

    def _tag_start(self) -> int | None:
        """Where at the buffer's end a tag may have begun."""
        buffer, longest = self._buffer, max(map(len, self.tags))
        for start in range(max(0, len(buffer) - longest + 1), len(buffer)):
            if any(tag.startswith(buffer[start:]) for tag in self.tags):
                return start
        return None

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        if self._only_one:
            return [event for event in events if not is_later_call(event)]
        return events


class ToolParser(AnswerParser):
    """Words, and calls between tags."""

    def __init__(self, only_one: bool = False) -> None:
        super().__init__(only_one)
        self._reader: CallReader | None = None
        self._before = ""  # white space and tag before the call that is being read
        self._gap = False  # the last thing was a call: white space here belongs to neither

    def flush(self, is_cut: bool = False) -> list[Event]:
        if self._reader is not None and not self._reader.has_begun:
            is_half = is_cut and self._reader.may_be_call
            self._buffer = "" if is_half else self._before + self._reader.give_up() + self._buffer
        elif is_cut and self._tag_start() is not None:
            self._buffer = self._buffer[: self._num_safe()]
        self._reader = None
        self._say(self._buffer.rstrip() if self.num_calls else self._buffer)
        self._buffer = ""
        return self._take()

    def _advance(self) -> bool:
        return self._read_words() if self._reader is None else self._read_call(self._reader)

    def _read_words(self) -> bool:
        found = [(place, tag) for tag in self.tags if (place := self._buffer.find(tag)) >= 0]
        if not found:
            safe = self._num_safe()
            self._say(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        place, tag = min(found)
        words = self._buffer[:place].rstrip()
        self._say(words)
        self._before = self._buffer[len(words) : place + len(tag)]
        self._buffer = self._buffer[place + len(tag) :]
        self._on_tag(tag)
        return True

    def _num_safe(self) -> int:
        """How much of the buffer is words for certain."""
        start = self._tag_start()
        return len(self._buffer[:start].rstrip())

    def _read_call(self, reader: CallReader) -> bool:
        if not self._buffer:
            return False
        events = reader.feed(self._buffer)
        self._buffer = ""
        self.num_calls += sum(isinstance(event, CallBegins) for event in events)
        self._events += events
        if not (reader.is_done or reader.is_no_call):
            return False
        self._reader, self._buffer = None, reader.rest
        if reader.is_no_call:
            self._on_no_call()
        else:
            self._gap = True
        return True

    def _begin_call(self, is_marked: bool = True) -> None:
        self._reader = CallReader(self.num_calls, is_marked)

    def _say(self, text: str) -> None:
        if self._gap:
            text = text.lstrip()
        if text:
            self._gap = False
            self._events.append(Text(text))

    @abstractmethod
    def _on_tag(self, tag: str) -> None:
        """The buffer begins behind it."""

    def _on_no_call(self) -> None:
        """What looked like a call is words, and so is what stood before it."""
        self._say(self._before)


class WordsParser(AnswerParser):
    """All of the text is words."""

    tags = ()

    def flush(self, is_cut: bool = False) -> list[Event]:
        return []

    def _advance(self) -> bool:
        if self._buffer:
            self._events.append(Text(self._buffer))
            self._buffer = ""
        return False


def is_later_call(event: Event) -> bool:
    return isinstance(event, (CallBegins, CallArguments)) and event.index > 0


def parse(parser: AnswerParser, text: str) -> ParsedMessage:
    """A whole message."""
    return ParsedMessage.of([*parser.push(text), *parser.flush()])
