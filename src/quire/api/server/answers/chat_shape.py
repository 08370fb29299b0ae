"""A chat's answer as OpenAI writes it: a message, or the deltas of one."""

from __future__ import annotations

from typing import Any

from quire.api.server.answers.call_writer import CallWriter
from quire.api.server.answers.choices import Delta
from quire.api.server.answers.generation import Generation
from quire.api.server.answers.logprobs import TokenNames, chat_entries, prompt_entries
from quire.api.server.answers.tool_use import ToolUse
from quire.api.server.schema.chat import ChatRequest


class ChatShape:
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, body: ChatRequest, names: TokenNames, tool_use: ToolUse | None = None
    ) -> None:
        """With `tool_use`, calls and thoughts are looked for in the text."""
        self._body = body
        self._names = names
        self._tool_use = tool_use
        self._shows_ids = bool(body.return_token_ids)

    def choice(self, delta: Delta, generation: Generation) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        reason = delta.finish_reason
        if self._tool_use is not None:
            writer = self._tool_use.writer(delta.index)
            message |= writer.message(delta)
            reason = writer.finish_reason(reason)
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
            **delta.scores,
        }
        if self._body.prompt_logprobs is not None:
            ids = generation.prompts[delta.prompt_index].token_ids.tolist()
            judged = generation.prompt_logprobs[delta.prompt_index]
            choice["prompt_logprobs"] = prompt_entries(self._names, ids, judged)
        return choice | self._ids(delta)

    def chunks(self, delta: Delta, generation: Generation) -> list[dict[str, Any]]:
        chunks = []
        if delta.is_first:
            chunks.append(_chunk(delta.index, {"role": "assistant", "content": ""}))
        reason = delta.finish_reason
        if self._tool_use is not None:
            writer = self._tool_use.writer(delta.index)
            chunks += self._calls(writer, delta)
            reason = writer.finish_reason(reason)
        elif delta.text or self._has_more(delta):
            chunk = _chunk(delta.index, {"content": delta.text}, self._logprobs(delta))
            chunks.append(chunk | self._ids(delta))
        if reason is not None:
            end = _chunk(delta.index, {}, reason=reason)
            chunks.append(end | {"stop_reason": delta.stop_reason})
        return chunks

    def beside_choices(self, generation: Generation) -> dict[str, Any]:
        if not self._shows_ids:
            return {}
        return {"prompt_token_ids": generation.prompts[0].token_ids.tolist()}

    def usage_details(self) -> dict[str, Any]:
        count = None if self._tool_use is None else self._tool_use.reasoning_tokens
        return {} if count is None else {"completion_tokens_details": {"reasoning_tokens": count}}

    def _has_more(self, delta: Delta) -> bool:
        """Whether the delta has something besides its text."""
        return bool(delta.entries or (self._shows_ids and delta.token_ids))

    def _ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self._shows_ids else {}

    def _calls(self, writer: CallWriter, delta: Delta) -> list[dict[str, Any]]:
        """Logprobs and ids come with the first event, even if its text is still held back."""
        parts = writer.deltas(delta)
        if not parts and self._has_more(delta):
            parts = [{}]
        chunks = [_chunk(delta.index, part) for part in parts]
        if chunks:
            chunks[0] |= {"logprobs": self._logprobs(delta), **self._ids(delta)}
        return chunks

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        # The token that ends a message is left out of its content.
        ids, entries = delta.token_ids, delta.entries
        if delta.ended_by_token:
            ids, entries = ids[:-1], entries[:-1]
        content = chat_entries(self._names, ids, entries, self._body.top_logprobs or 0)
        return {"content": content, "refusal": None}


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
