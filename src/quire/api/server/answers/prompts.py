"""From texts and conversations to token ids that the engine will take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.engine.limits import Limits, checked_ids
from quire.errors import PromptTooLong, RequestError
from quire.models.text.quoting import Quotes
from quire.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

LONG_TEXT = 20_000  # characters from which tokenizing would hold up other streams


@dataclass(frozen=True)
class Prompt:
    token_ids: TokenIds
    text: str | None = None  # None if the prompt was given as ids


class PromptReader:
    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("This model has no tokenizer; give the prompt as token ids.")
        return self._tokenizer

    async def read(self, prompt: str | Sequence[int], add_special_tokens: bool = True) -> Prompt:
        if not isinstance(prompt, str):
            return self._prompt(prompt)
        return self._prompt(await self.encode(prompt, add_special_tokens), prompt)

    async def read_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> Prompt:
        quotes = Quotes(self.tokenizer)

        def read() -> list[int]:
            shown, given = quotes.hide(messages), quotes.hide(variables)
            text = self.tokenizer.apply_chat_template(shown, add_generation_prompt, given)
            self._refuse_endless(text)
            return quotes.encode(text)

        return self._prompt(await asyncio.to_thread(read))

    def _prompt(self, token_ids: Sequence[int], text: str | None = None) -> Prompt:
        return Prompt(checked_ids(token_ids, self._limits.vocab_size), text)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._refuse_endless(text)
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    def _refuse_endless(self, text: str) -> None:
        """Refuse, untokenized, a text that is too long even if every token were the longest."""
        most = self._limits.max_model_len * self._longest_token
        if len(text) > most:
            raise PromptTooLong(
                f"The prompt has {len(text):,} characters, more than "
                f"{self._limits.max_model_len:,} tokens can hold; shorten it."
            )

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.backend.get_vocab()), default=1)
