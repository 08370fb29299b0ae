"""How a model writes an answer: its thoughts, its words and its calls."""

from __future__ import annotations

from dataclasses import dataclass

from quire.api.reasoning.names import ALIASES, AUTO, HARMONY
from quire.api.reasoning.parser import ThoughtParser
from quire.api.reasoning.tags import ThoughtTags, choose_tags
from quire.api.tools.formats import FORMATS, ToolFormat, choose_format
from quire.api.tools.parser import AnswerParser, WordsParser
from quire.kv.index import TokenIds
from quire.models.text.tokenizer import Tokenizer

PROMPT_END_TOKENS = 16  # more than a tag and a line break take, even as letters


@dataclass(frozen=True)
class AnswerFormat:
    calls: ToolFormat
    thoughts: ThoughtTags | None  # channels, where the model has them, are not tags

    @classmethod
    def choose(
        cls, chat_template: str | None, calls: str = AUTO, thoughts: str = AUTO
    ) -> AnswerFormat:
        """By settings, or as the model's chat template shows."""
        if ALIASES.get(thoughts, thoughts) == HARMONY:
            return cls(FORMATS["harmony"], None)
        tool_format = choose_format(chat_template, calls)
        if tool_format.has_channels:
            return cls(tool_format, None)
        return cls(tool_format, choose_tags(chat_template, thoughts))

    @property
    def has_thoughts(self) -> bool:
        return self.thoughts is not None or self.calls.has_channels

    def parser(
        self, prompt_end: str = "", *, may_call: bool = True, only_one: bool = False
    ) -> AnswerParser:
        """For one answer to a prompt that ends so."""
        reads_calls = may_call or self.calls.has_channels
        rest = self.calls.parser(only_one) if reads_calls else WordsParser()
        if self.thoughts is None:
            return rest
        return ThoughtParser(self.thoughts, rest, self.thoughts.opening(prompt_end) == "open")

    def shows_special(self, tokenizer: Tokenizer, may_call: bool = True) -> bool:
        """Whether any of its tags is a special token, which texts usually leave out."""
        tags = () if self.thoughts is None else (self.thoughts.open, self.thoughts.close)
        ids = {tokenizer.backend.token_to_id(tag) for tag in tags}
        reads_calls = may_call or self.calls.has_channels
        return bool(ids & tokenizer.special_ids) or (
            reads_calls and self.calls.shows_special(tokenizer)
        )


def prompt_end(tokenizer: Tokenizer, prompt_ids: TokenIds) -> str:
    """The last few tokens of a prompt as text, which show whether a thought is open."""
    return tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:].tolist(), skip_special_tokens=False)
