"""The model's tokens as `llguidance` sees them: bytes, special tokens, ends of text.

The library can read a tokenizer file itself, but then takes added tokens for special ones by their
looks, and text that spells a special token for that token. So it is told what each token means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from quire.errors import RequestError
from quire.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """The attributes are those that `LLTokenizer` asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's: ids that the tokenizer does not have are never allowed."""
        ends = [*eos_token_ids]
        if not ends and tokenizer.eos_token_id is not None:
            ends = [tokenizer.eos_token_id]
        if not ends:
            raise RequestError(
                "This model names no end-of-text token, which structured output needs; leave "
                "structured out."
            )
        self.eos_token_ids = ends
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = {*tokenizer.special_ids, *ends}
        self.special_token_ids = sorted(i for i in special if i < vocab_size)
        self._backend = _plain_text_backend(tokenizer.backend)
        self._guided: LLTokenizer | None = None

    def guided(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._guided is None:
            wrapper: Any = self  # by its shape, not by its class
            self._guided = LLTokenizer(
                wrapper, n_vocab=len(self.tokens), eos_token=self.eos_token_ids
            )
        return self._guided

    def to_plain(self) -> dict[str, Any]:
        """As JSON for another process, which needs no tokenizer for it; bytes are Latin-1."""
        return {
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "eos": self.eos_token_ids,
            "bos": self.bos_token_id,
            "special": self.special_token_ids,
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens that the model would expect, where the grammar leaves no choice of text."""
        plain = text if isinstance(text, str) else text.decode()
        ids: list[int] = self._backend.encode(plain, add_special_tokens=False).ids
        if all(i < len(self.tokens) for i in ids):
            meant = b"".join(self.tokens[i] for i in ids)
            if meant == plain.encode() and not set(ids) & set(self.special_token_ids):
                return ids
        return self.guided().greedy_tokenize(plain)


def _plain_text_backend(backend: Backend) -> Backend:
    """The same tokenizer for text in the middle of another: no space before it, nothing special."""
    before = {
        "normalizer": _spec(backend.normalizer),
        "pre_tokenizer": _spec(backend.pre_tokenizer),
    }
    changed = {
        "normalizer": _without_prefix(before["normalizer"], "normalizers"),
        "pre_tokenizer": _without_prefix(before["pre_tokenizer"], "pretokenizers"),
    }
    whole = backend.to_str()
    if changed != before:  # most need not be taken apart, with all their tokens
        whole = json.dumps(json.loads(whole) | changed)
    plain = Backend.from_str(whole)
    plain.encode_special_tokens = True  # as the text they are, not as the tokens they spell
    return plain


def _spec(part: Any) -> dict[str, Any] | None:
    """What a tokenizer's file says of one of its parts."""
    return None if part is None else json.loads(part.__getstate__())


def _without_prefix(part: dict[str, Any] | None, inner: str) -> dict[str, Any] | None:
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        kept = [_without_prefix(each, inner) for each in part[inner]]
        return {**part, inner: [each for each in kept if each is not None]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part
