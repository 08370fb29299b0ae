"""How many tokens of an answer are thoughts, with the tags that mark them.

Counted by the ids of tags: a tag that is several tokens in this model's vocabulary is not seen, and
the count then unknown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.tags import Opening, ThoughtTags
from quire.api.tools import harmony
from quire.models.text.tokenizer import Tokenizer
from quire.thinking import LONGEST_HEADER, is_thought

FEW = 3  # tokens before the first tag: white space


class ThoughtCounter(ABC):
    """`push` the tokens of one answer, in any pieces."""

    def __init__(self) -> None:
        self.count = 0

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> None: ...


def thought_counter(
    answer_format: AnswerFormat, tokenizer: Tokenizer, opening: Opening
) -> ThoughtCounter | None:
    tags = answer_format.thoughts
    if answer_format.calls.has_channels:
        return _ChannelCounter(tokenizer)
    if tags is None or tokenizer.backend.token_to_id(tags.close) is None:
        return None
    return _TagCounter(tokenizer, tags, opening)


class _TagCounter(ThoughtCounter):
    def __init__(self, tokenizer: Tokenizer, tags: ThoughtTags, opening: Opening) -> None:
        super().__init__()
        self._open = tokenizer.backend.token_to_id(tags.open)
        self._close = tokenizer.backend.token_to_id(tags.close)
        self._num_seen = 0
        self._is_open = opening == "open"
        self._is_over = False

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._num_seen += 1
            self._is_open = self._is_open or token_id == self._open
            self.count += self._is_open
            too_late = not self._is_open and self._num_seen >= FEW
            self._is_over = too_late or (self._is_open and token_id == self._close)


class _ChannelCounter(ThoughtCounter):
    """Counts messages of the channel of thoughts, from the header to the tag that ends them; one
    that begins the next header is of that."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        token_id = tokenizer.backend.token_to_id
        self._message = token_id(harmony.MESSAGE)
        self._begins = {token_id(tag) for tag in harmony.BEGINS} - {None}
        self._ends = {token_id(tag) for tag in harmony.ENDS} - {None}
        self._header: list[int] | None = []  # None: within a message
        self._is_thought = False

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._header is None:
                self._read_message(token_id)
            else:
                self._read_header(self._header, token_id)

    def _read_header(self, header: list[int], token_id: int) -> None:
        header.append(token_id)
        if token_id == self._message or len(header) > LONGEST_HEADER:
            text = self._tokenizer.decode(header, skip_special_tokens=False)
            self._is_thought = is_thought(text)
            self.count += len(header) * self._is_thought
            self._header = None

    def _read_message(self, token_id: int) -> None:
        if token_id in self._begins:
            self._header = [token_id]
            return
        self.count += self._is_thought
        if token_id in self._ends:
            self._header = []
