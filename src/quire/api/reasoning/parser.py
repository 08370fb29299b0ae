"""From a model's text to its thoughts, and then to what another parser makes of the rest.

    <think> ─► thoughts ─► </think> ─► words and calls

A thought is the first thing in an answer or does not come at all: a tag behind the first word, in
code for one, is words. The first tag that closes it ends it. White space around a thought is
dropped. Where a text is cut off, what may be the beginning of a tag is not said.
"""

from __future__ import annotations

from typing import Literal

from quire.api.reasoning.tags import ThoughtTags
from quire.api.tools.events import Event, Reasoning, Text
from quire.api.tools.parser import AnswerParser


class MergingParser(AnswerParser):
    """What another parser tells apart as thoughts is words; a blank line is between both."""

    tags = ()

    def __init__(self, rest: AnswerParser) -> None:
        super().__init__()
        self._rest = rest
        self._last: type[Event] | None = None  # of the words so far

    def flush(self, is_cut: bool = False) -> list[Event]:
        self._merge(self._rest.flush(is_cut))
        return self._take()

    def _advance(self) -> bool:
        self._merge(self._rest.push(self._buffer))
        self._buffer = ""
        return False

    def _merge(self, events: list[Event]) -> None:
        self.num_calls = self._rest.num_calls
        for event in events:
            if isinstance(event, (Text, Reasoning)):
                kind, gap = type(event), "" if self._last in (None, type(event)) else "\n\n"
                event, self._last = Text(gap + event.text), kind
            self._events.append(event)


class ThoughtParser(AnswerParser):
    """`rest` reads what is behind the thought; with `is_open`, the prompt has begun one."""

    def __init__(self, tags: ThoughtTags, rest: AnswerParser, is_open: bool = False) -> None:
        super().__init__()
        self.tags = (tags.close,)
        self._open, self._close = tags.open, tags.close
        self._rest = rest
        self._is_open = is_open
        self._place: Literal["start", "thought", "gap", "rest"] = "start"
        self._has_thought = False  # some of it has been said

    def flush(self, is_cut: bool = False) -> list[Event]:
        if self._place == "start":
            if is_cut and self._buffer.strip():
                self._buffer = ""  # the beginning of a tag
            self._leave_start()
        if self._place == "thought":
            self._think(self._buffer[: self._num_safe()] if is_cut else self._buffer)
        elif self._place == "rest":
            self._read_rest()
        self._buffer = ""
        self._events += self._rest.flush(is_cut)
        self.num_calls = self._rest.num_calls
        return self._take()

    def _advance(self) -> bool:
        match self._place:
            case "start":
                return self._read_start()
            case "thought":
                return self._read_thought()
            case "gap":
                return self._read_gap()
            case "rest":
                return self._read_rest()

    def _read_start(self) -> bool:
        """A tag may come first even where the prompt has one: some models repeat it."""
        begun = self._buffer.lstrip()
        if begun.startswith(self._open):
            self._buffer = begun[len(self._open) :]
            self._is_open = True
        elif self._open.startswith(begun):
            return False
        self._leave_start()
        return True

    def _leave_start(self) -> None:
        self._place = "thought" if self._is_open else "rest"

    def _read_thought(self) -> bool:
        place = self._buffer.find(self._close)
        if place < 0:
            safe = self._num_safe()
            self._think(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        self._think(self._buffer[:place])
        self._buffer = self._buffer[place + len(self._close) :]
        self._place = "gap"
        return True

    def _read_gap(self) -> bool:
        """Up to the first word behind the thought."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._place = "rest"
        return True

    def _read_rest(self) -> bool:
        self._events += self._rest.push(self._buffer)
        self.num_calls = self._rest.num_calls
        self._buffer = ""
        return False

    def _think(self, text: str) -> None:
        text = text.rstrip() if self._has_thought else text.strip()
        if text:
            self._has_thought = True
            self._events.append(Reasoning(text))

    def _num_safe(self) -> int:
        """How much of the buffer is thought for certain; white space may stand before the tag."""
        return len(self._buffer[: self._tag_start()].rstrip())
