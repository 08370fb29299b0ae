"""From texts and conversations to token ids that the engine will take."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.engine.limits import Limits, checked_ids
from quire.errors import PromptTooLong, RequestError
from quire.models.text.chat_template import plain_text
from quire.models.text.fill_in_middle import fill_in_middle
from quire.models.text.quoting import DIGITS, Quotes
from quire.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

LONG_TEXT = 20_000  # characters from which tokenizing would hold up other streams


@dataclass(frozen=True)
class Prompt:
    token_ids: TokenIds
    text: str | None = None  # None if the prompt was given as ids
    begun: str | None = None  # the part of the answer that a conversation ends with


class PromptReader:
    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("This model has no tokenizer; give the prompt as token ids.")
        return self._tokenizer

    async def read(
        self,
        prompt: str | Sequence[int],
        add_special_tokens: bool = True,
        suffix: str | None = None,
    ) -> Prompt:
        """With a `suffix`, a prompt whose answer stands between the two."""
        if not isinstance(prompt, str):
            return self._prompt(prompt)
        if suffix:
            self._refuse_endless(prompt + suffix)
            filled = asyncio.to_thread(fill_in_middle, self.tokenizer, prompt, suffix)
            return self._prompt(await filled)
        return self._prompt(await self.encode(prompt, add_special_tokens), prompt)

    async def read_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
        *,
        continue_final: bool = False,
    ) -> Prompt:
        """With `continue_final`, the answer goes on where the last message ends."""
        quotes = Quotes(self.tokenizer)

        begun: str | None = None
        if continue_final:
            begun = plain_text(len(messages) - 1, messages[-1].get("content")) or ""
            messages = [*messages[:-1], {**messages[-1], "content": begun}]

        def read() -> list[int]:
            shown, given = quotes.hide(messages), quotes.hide(variables)
            if continue_final:
                text = self._unfinished(shown, given)
            else:
                text = self.tokenizer.apply_chat_template(shown, add_generation_prompt, given)
            self._refuse_endless(text)
            return quotes.encode(text)

        return replace(self._prompt(await asyncio.to_thread(read)), begun=begun)

    def _unfinished(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The conversation up to the end of its last message's text, which a number marks."""
        *before, last = messages
        end = f"{secrets.randbelow(10**DIGITS):0{DIGITS}d}"
        marked = [*before, {**last, "content": f"{last['content']}{end}"}]
        text = self.tokenizer.apply_chat_template(marked, False, variables)
        begun, found, _ = text.rpartition(end)
        if not found:
            raise RequestError(
                "The model's chat template leaves out the last message, so that it cannot be "
                "continued; end with a message of the user."
            )
        return begun

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
            size = f"{len(text):,} characters"
            raise PromptTooLong.of("prompt", size, self._limits.max_model_len)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.backend.get_vocab()), default=1)
