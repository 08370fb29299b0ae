"""Errors as Anthropic's API writes them, for clients that speak it.

Such a client is known by the address that it asks, or by the header with the API's version, which
every request of Anthropic's own client has. So errors that arise before any route have the right
shape, too.
"""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from quire.api.server.http.request_ids import current_id

VERSION_HEADER = "anthropic-version"
PATHS = ("/v1/messages", "/messages")

OVERLOADED = 529  # Anthropic's 429 is a limit of one customer's, and there are none here
STATUSES = {429: OVERLOADED}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    OVERLOADED: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    path = scope["path"].rstrip("/")
    is_messages = path in PATHS or path.startswith(tuple(f"{each}/" for each in PATHS))
    return is_messages or VERSION_HEADER in Headers(scope=scope)


def anthropic_status(status: int) -> int:
    return STATUSES.get(status, status)


def anthropic_error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    of_all = "invalid_request_error" if status < 500 else "api_error"
    error: dict[str, Any] = {
        "type": TYPES.get(anthropic_status(status), of_all),
        "message": message,
    }
    if code is not None:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error, "request_id": current_id()}
