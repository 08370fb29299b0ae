"""gpt-oss's way, harmony: an answer is several messages, each with a header that says whose it is.

    <|channel|>analysis<|message|>…<|end|>                                  thoughts
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>                words for the reader

The prompt ends with `<|start|>assistant`, so an answer begins within its first header; one that
does not, such as JSON that a grammar has forced, is words.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.api.tools.events import CallArguments, CallBegins, Event, Reasoning, Text
from quire.api.tools.parser import AnswerParser
from quire.thinking import CHANNEL, FUNCTIONS, LONGEST_HEADER, RECIPIENT, is_thought

START, CONSTRAIN, MESSAGE = "<|start|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
BEGINS = (START, CHANNEL)  # of a header
ENDS = (END, CALL, RETURN, *BEGINS)  # of a message; models leave out the first ones at times
HEADER_BEGINS = ("<|", "to=")


class HarmonyParser(AnswerParser):
    tags = ENDS
    inner_tags = (CONSTRAIN, MESSAGE)

    def __init__(self, only_one: bool = False) -> None:
        super().__init__(only_one)
        self._event: Callable[[str], Event] | None = None  # of a message's text; None: in a header
        self._is_first = True  # nothing has been read yet

    def flush(self, is_cut: bool = False) -> list[Event]:
        if self._event is not None:
            self._emit(self._buffer[: self._num_safe()] if is_cut else self._buffer)
        elif self._is_first and not is_cut:
            self._emit(self._buffer, Text)
        self._buffer = ""
        return self._take()

    def _advance(self) -> bool:
        return self._read_header() if self._event is None else self._read_message()

    def _read_header(self) -> bool:
        """A header is read when it is whole; an answer without one is a message of words."""
        place = self._buffer.find(MESSAGE, 0, LONGEST_HEADER)
        if not self._may_be_header():
            self._event = Text
        elif place < 0 and len(self._buffer) >= LONGEST_HEADER:
            self._event = Text
            self._emit(self._buffer[0])  # of the tag it begins with, which would be found again
            self._buffer = self._buffer[1:]
        elif place < 0:
            return False
        else:
            header, self._buffer = self._buffer[:place], self._buffer[place + len(MESSAGE) :]
            self._begin_message(header)
        self._is_first = False
        return True

    def _may_be_header(self) -> bool:
        """Of the first one, whose beginning is in the prompt: whether it goes on as one may."""
        begun = self._buffer.lstrip()[: max(map(len, HEADER_BEGINS))]
        is_begun = any(each.startswith(begun) or begun.startswith(each) for each in HEADER_BEGINS)
        return is_begun or not self._is_first

    def _begin_message(self, header: str) -> None:
        recipient = RECIPIENT.search(header)
        if is_thought(header):
            self._event = Reasoning
        elif recipient is None:
            self._event = Text
        else:
            index, self.num_calls = self.num_calls, self.num_calls + 1
            self._events.append(CallBegins(index, recipient[1].removeprefix(FUNCTIONS)))
            self._event = lambda text: CallArguments(index, text)

    def _read_message(self) -> bool:
        found = [(place, tag) for tag in ENDS if (place := self._buffer.find(tag)) >= 0]
        if not found:
            safe = self._num_safe()
            self._emit(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        place, tag = min(found)
        self._emit(self._buffer[:place])
        self._event = None
        is_in_header = tag in BEGINS
        self._buffer = self._buffer[place if is_in_header else place + len(tag) :]
        return True

    def _num_safe(self) -> int:
        """All but what may be the beginning of a tag: white space is the model's own."""
        start = self._tag_start()
        return len(self._buffer) if start is None else start

    def _emit(self, text: str, event: Callable[[str], Event] | None = None) -> None:
        event = event or self._event
        if text and event is not None:
            self._events.append(event(text))
