"""The response object: what was asked for, how far it has come, and what came out of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire.api.server.errors import ApiError
from quire.api.server.responses.items import Item
from quire.api.server.schema.responses import ResponsesRequest

# Fields of a request that its response shows as they came.
SHOWN = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
)
ENDED = ("completed", "incomplete", "failed", "cancelled")


class ResponseObject:
    def __init__(self, body: ResponsesRequest, response_id: str, model: str) -> None:
        self.id = response_id
        reasoning, text = body.reasoning, body.text
        form = text.format if text is not None else None
        summary = (reasoning.summary or reasoning.generate_summary) if reasoning else None
        self._fields: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": bool(body.background),
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.effort, "summary": summary},
            "service_tier": "default",
            "store": body.is_stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {
                "format": form or {"type": "text"},
                "verbosity": (text.verbosity if text is not None else None) or "medium",
            },
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            **{name: getattr(body, name) for name in SHOWN},
        }

    def at(
        self,
        status: str,
        output: Sequence[Item] = (),
        usage: dict[str, Any] | None = None,
        error: ApiError | None = None,
    ) -> dict[str, Any]:
        """All of it, at this point of its life."""
        is_cut = status == "incomplete"
        return {
            **self._fields,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else failure(error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(output),
            "usage": usage,
        }


def failure(error: ApiError) -> dict[str, Any]:
    """A response's `error`, whose codes are not those of HTTP errors."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    if 400 <= error.status < 429:
        code = "invalid_prompt"
    return {"code": code, "message": str(error)}


def usage_of(chat_usage: dict[str, Any], num_reasoning_tokens: int) -> dict[str, Any]:
    """A chat's usage by the names it has here."""
    prompt, new = chat_usage["prompt_tokens"], chat_usage["completion_tokens"]
    return {
        "input_tokens": prompt,
        # What is written into the cache is not counted: it costs nothing here.
        "input_tokens_details": {**chat_usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": new,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": prompt + new,
    }
