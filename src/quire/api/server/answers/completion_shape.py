"""A completion as OpenAI writes it: text, and logprobs in four lists side by side."""

from __future__ import annotations

from typing import Any

from quire.api.server.answers.choices import Delta
from quire.api.server.answers.generation import Generation
from quire.api.server.answers.logprobs import CompletionLogprobs, Entry, TokenNames, prompt_entries
from quire.api.server.answers.prompts import Prompt
from quire.api.server.schema.completions import CompletionRequest
from quire.engine.text.detokenizer import TextStream, text_stream
from quire.models.text.tokenizer import Tokenizer


class CompletionShape:
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, body: CompletionRequest, names: TokenNames, tokenizer: Tokenizer | None
    ) -> None:
        self._body = body
        self._names = names
        self._tokenizer = tokenizer
        self._shows_ids = bool(body.return_token_ids)
        self._offsets: dict[int, Offsets] = {}  # by choice

    def chunks(self, delta: Delta, generation: Generation) -> list[dict[str, Any]]:
        is_news = not delta.is_empty or (self._shows_ids and delta.token_ids)
        return [self.choice(delta, generation)] if is_news else []

    def choice(self, delta: Delta, generation: Generation) -> dict[str, Any]:
        prompt = generation.prompts[delta.prompt_index]
        judged = generation.prompt_logprobs[delta.prompt_index]
        echoes = bool(self._body.echo) and delta.is_first
        text = self._prompt_text(prompt) + delta.text if echoes else delta.text
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **delta.scores,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(delta, prompt, judged)
        if self._body.prompt_logprobs is not None and delta.is_first:
            ids = prompt.token_ids.tolist()
            choice["prompt_logprobs"] = prompt_entries(self._names, ids, judged)
        if self._shows_ids:
            choice["token_ids"] = delta.token_ids
            if delta.is_first:
                choice["prompt_token_ids"] = prompt.token_ids.tolist()
        return choice

    def usage_details(self) -> dict[str, Any]:
        return {}

    def beside_choices(self, generation: Generation) -> dict[str, Any]:
        return {}  # with several prompts, what there is to say of each stands in its choices

    def _logprobs(self, delta: Delta, prompt: Prompt, judged: list[Entry]) -> dict[str, Any]:
        lists = CompletionLogprobs(self._names)
        offsets = self._offsets.get(delta.index)
        if offsets is None:
            offsets = self._offsets[delta.index] = Offsets(self._tokenizer)
            if self._body.echo:
                ids = prompt.token_ids.tolist()
                for token_id, entry in zip(ids, [None, *judged], strict=True):
                    lists.add(token_id, entry, offsets.before(token_id))
                offsets.place = len(self._prompt_text(prompt))
        for token_id, entry in zip(delta.token_ids, delta.entries, strict=True):
            lists.add(token_id, entry, offsets.before(token_id))
        return lists.take()

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None or self._tokenizer is None:
            return prompt.text or ""
        return self._tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)


class Offsets:
    """Where in the text each token begins; half a character belongs to the one it completes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.place = 0
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = text_stream(tokenizer, skip_special=False)

    def before(self, token_id: int) -> int:
        place = self.place
        if self._stream is not None:
            self.place += len(self._stream.push(token_id))
        return place
