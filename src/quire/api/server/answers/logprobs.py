"""Log-probabilities in OpenAI's two shapes, from what the engine says of each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from quire.models.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no −∞; this is what OpenAI writes

# One token's entry as it crosses the processes: logprob, rank, ids of the best, their logprobs.
Entry = list[Any]


class TokenNames:
    """How tokens are written: by their text, or by their bytes where those are no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=8192)(self._text)  # all that is usual, in a megabyte or two

    def bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entries(
    names: TokenNames, token_ids: Iterable[int], entries: Iterable[Entry], top: int
) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names.text(token_id),
            "logprob": max(logprob, LEAST),
            "bytes": list(names.bytes(token_id)),
        }

    return [
        {
            **named(token_id, logprob),
            "top_logprobs": [named(*best) for best in list(zip(ids, values, strict=True))[:top]],
        }
        for token_id, (logprob, _, ids, values) in zip(token_ids, entries, strict=True)
    ]


class CompletionLogprobs:
    """The four lists of a completion's `logprobs`."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token_id: int, entry: Entry | None, offset: int) -> None:
        """The first token of a prompt has no entry."""
        text = self._names.text
        self.tokens.append(text(token_id))
        self.text_offset.append(offset)
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        logprob, _, ids, values = entry
        best: dict[str, float] = {}
        for other, value in [*zip(ids, values, strict=True), (token_id, logprob)]:
            best.setdefault(text(other), max(value, LEAST))
        self.token_logprobs.append(max(logprob, LEAST))
        self.top_logprobs.append(best)

    def take(self) -> dict[str, Any]:
        return {
            "text_offset": self.text_offset,
            "token_logprobs": self.token_logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top_logprobs,
        }


def prompt_entries(
    names: TokenNames, token_ids: Sequence[int], entries: Sequence[Entry]
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: by token id, for each token of the prompt but the first."""

    def named(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": max(logprob, LEAST),
            "rank": rank,
            "decoded_token": names.text(token_id),
        }

    listed: list[dict[str, Any] | None] = [None]
    for token_id, (logprob, rank, ids, values) in zip(token_ids[1:], entries, strict=True):
        ranked = enumerate(zip(ids, values, strict=True), start=1)
        best = {str(other): named(other, value, place) for place, (other, value) in ranked}
        listed.append({str(token_id): named(token_id, logprob, rank)} | best)
    return listed
