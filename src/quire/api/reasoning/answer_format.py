"""How a model writes an answer: its thoughts, its words and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.api.reasoning.names import ALIASES, AUTO, HARMONY, OFF
from quire.api.reasoning.parser import MergingParser, ThoughtParser
from quire.api.reasoning.tags import Opening, ThoughtTags, choose_tags
from quire.api.tools.formats import FORMATS, ToolFormat, choose_format
from quire.api.tools.parser import AnswerParser, WordsParser
from quire.kv.index import TokenIds
from quire.models.text.tokenizer import Tokenizer

PROMPT_END_TOKENS = 16  # more than a tag and a line break take, even as letters


@dataclass(frozen=True)
class AnswerFormat:
    calls: ToolFormat
    thoughts: ThoughtTags | None  # channels, where the model has them, are not tags
    merges: bool = False  # thoughts on a channel are words

    @classmethod
    def choose(
        cls, chat_template: str | None, calls: str = AUTO, thoughts: str = AUTO
    ) -> AnswerFormat:
        """By settings, or as the model's chat template shows."""
        if ALIASES.get(thoughts, thoughts) == HARMONY:
            return cls(FORMATS["harmony"], None)
        tool_format = choose_format(chat_template, calls)
        if tool_format.has_channels:
            return cls(tool_format, None, merges=thoughts == OFF)
        return cls(tool_format, choose_tags(chat_template, thoughts))

    @property
    def has_thoughts(self) -> bool:
        return self.thoughts is not None or self.calls.has_channels

    def merged(self) -> AnswerFormat:
        """The same, with thoughts left in the words."""
        return replace(self, thoughts=None, merges=self.calls.has_channels)

    def opening(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] | TokenIds, begun: str | None = None
    ) -> Opening:
        """How the answer to a prompt begins, `begun` being the part of it that was given."""
        if self.thoughts is None:
            return "free"
        if begun is not None:
            return self.thoughts.opening_behind(begun)
        last = [int(token_id) for token_id in prompt_ids[-PROMPT_END_TOKENS:]]
        return self.thoughts.opening(tokenizer.decode(last, skip_special_tokens=False))

    def parser(
        self, opening: Opening = "free", *, may_call: bool = True, only_one: bool = False
    ) -> AnswerParser:
        """For one answer that begins so."""
        reads_calls = may_call or self.calls.has_channels
        rest = self.calls.parser(only_one) if reads_calls else WordsParser()
        if self.thoughts is None:
            return MergingParser(rest) if self.merges else rest
        return ThoughtParser(self.thoughts, rest, opening == "open")

    def shows_special(self, tokenizer: Tokenizer, may_call: bool = True) -> bool:
        """Whether any of its tags is a special token, which texts usually leave out."""
        tags = () if self.thoughts is None else (self.thoughts.open, self.thoughts.close)
        ids = {tokenizer.backend.token_to_id(tag) for tag in tags}
        reads_calls = may_call or self.calls.has_channels
        return bool(ids & tokenizer.special_ids) or (
            reads_calls and self.calls.shows_special(tokenizer)
        )
