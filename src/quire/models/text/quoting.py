"""What a message says is text: the spelling of a special token in it is not that token.

A chat template writes the model's special tokens and the messages into one text. Encoded as it is,
a message that says `<|im_end|>` would end its turn, and could begin one in any role's name. So such
spellings are taken out before the template sees them, and put back as text behind it:

    messages ─ hide ─► a random number for each spelling ─ template ─► text ─ encode ─► token ids
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError
from quire.models.text.tokenizer import Tokenizer

DEEPEST = 100
DIGITS = 24  # no filter of a template changes a number, and no message can guess this one


class Quotes:
    """The spellings that were taken out of one request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._mark = f"{secrets.randbelow(10**DIGITS):0{DIGITS}d}"
        self._hidden: list[str] = []

    def hide(self, value: Any, depth: int = 0) -> Any:
        """A value of JSON without the spellings in its strings, and in its keys."""
        if depth > DEEPEST:
            raise RequestError(f"Messages are nested up to {DEEPEST} levels deep; flatten them.")
        if isinstance(value, str):
            return self._tokenizer.special_spelling.sub(self._hide_one, value)
        if isinstance(value, Mapping):
            return {self.hide(k, depth): self.hide(v, depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(each, depth + 1) for each in value]
        return value

    def _hide_one(self, found: re.Match[str]) -> str:
        self._hidden.append(found[0])
        return f"{self._mark}{len(self._hidden) - 1:08d}"

    def encode(self, text: str) -> list[int]:
        """The tokens of what the template made; those that are special, it has written itself."""
        tokenizer = self._tokenizer
        if not self._hidden:
            return tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for at, piece in enumerate(re.split(f"({tokenizer.special_spelling.pattern})", text)):
            if at % 2:
                ids += tokenizer.encode(piece, add_special_tokens=False)
            elif piece:
                ids += tokenizer.encode_as_text(self.restore(piece))
        return ids

    def restore(self, text: str) -> str:
        marks = re.compile(rf"{self._mark}(\d{{8}})")
        return marks.sub(lambda found: self._hidden[int(found[1])], text)
