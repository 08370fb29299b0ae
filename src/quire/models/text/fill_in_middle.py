"""Prompts with a hole: text before and behind it, put together as the model was trained.

Which tokens mark the parts is seen in the vocabulary: each family has its own three.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import RequestError
from quire.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class HoleMarks:
    """The texts of special tokens, in the order of the prompt; what is filled in comes last."""

    before: str
    behind: str
    middle: str | None
    suffix_first: bool = False

    def tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.before, self.behind, self.middle)))


FAMILIES = (
    HoleMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite
    HoleMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    HoleMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    HoleMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    HoleMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    HoleMarks("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


def fill_in_middle(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """The prompt's tokens; RequestError for a model that was not trained to fill in."""
    vocabulary = tokenizer.backend.token_to_id
    for marks in FAMILIES:
        if all(vocabulary(token) is not None for token in marks.tokens()):
            return _prompt(tokenizer, marks, prefix, suffix)
    raise RequestError(
        "suffix needs a model with fill-in-the-middle tokens, which this one has not; leave it out."
    )


def _prompt(tokenizer: Tokenizer, marks: HoleMarks, prefix: str, suffix: str) -> list[int]:
    def mark(token: str | None) -> list[int]:
        token_id = None if token is None else tokenizer.backend.token_to_id(token)
        return [] if token_id is None else [token_id]

    first = mark(marks.before) + tokenizer.encode_as_text(prefix)
    second = mark(marks.behind) + tokenizer.encode_as_text(suffix)
    both = second + first if marks.suffix_first else first + second
    opening = tokenizer.encode("")  # such as a token that begins every text
    return opening + both + mark(marks.middle)
