"""Tags in a grammar."""

from __future__ import annotations

from quire.engine.grammar.source import quoted
from quire.models.text.tokenizer import Tokenizer


class TagTerminals:
    """A tag is a token of its own where the model has it as a special one, and text elsewhere."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tag: str) -> str:
        token_id = self._special(tag)
        return quoted(tag) if token_id is None else f"<[{token_id}]>"

    def are_tokens(self, *tags: str) -> bool:
        return all(self._special(tag) is not None for tag in tags)

    def _special(self, tag: str) -> int | None:
        token_id = self._tokenizer.backend.token_to_id(tag)
        return token_id if token_id in self._tokenizer.special_ids else None
