"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from quire.api.server.schema.chat import Messages, Tools
from quire.api.server.schema.common import Ids
from quire.api.server.schema.thinking import template_variables


class TokenizeRequest(BaseModel):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # to a prompt; a chat's template has its own
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None  # as a chat would show them
    return_token_strs: bool = False

    def template_variables(self) -> dict[str, Any]:
        return template_variables(self.chat_template_kwargs)


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False
