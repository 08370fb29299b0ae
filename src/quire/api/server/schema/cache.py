"""`/v1/cache/…`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from quire.api.server.schema.chat import Messages
from quire.api.server.schema.common import MAX_SALT_CHARS, Ids

MOST_SECONDS = 30 * 86_400


class PrefixRequest(BaseModel):
    """One of `prompt`, `messages` and `tokens`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tokens: Ids | None = None
    # Of the requests that it is for.
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""


class PinRequest(PrefixRequest):
    seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)]


class DeleteRequest(PrefixRequest):
    """Or `everything` that the key's tenant has."""

    everything: bool = False
