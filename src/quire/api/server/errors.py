"""Everything that goes wrong, in the shape that OpenAI's clients expect."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from quire.api.server.http.request_ids import current_id
from quire.api.server.messages.errors import (
    anthropic_error,
    anthropic_status,
    speaks_anthropic,
)
from quire.engine.process.request_handle import EngineDied, RequestFailed
from quire.errors import PromptTooLong, QuireError, RequestError
from quire.params import SamplingParams

log = logging.getLogger("quire.server")

TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}  # besides the two below


FIELDS = {*SamplingParams.__dataclass_fields__, "priority", "suffix", "tools", "tool_choice"}
NOT_SENT_AS_JSON = "Send the body as JSON, with the header `Content-Type: application/json`."


class ApiError(QuireError):
    """A request fails: the HTTP status, one sentence, and OpenAI's `code` and `param`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        of_all = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": TYPES.get(self.status, of_all),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, scope: Scope | None = None) -> Response:
        """As the client of the request in `scope` expects it; OpenAI's shape without one."""
        status, body = self.status, self.body()
        if scope is not None and speaks_anthropic(scope):
            status = anthropic_status(self.status)
            body = anthropic_error(self.status, str(self), self.code)
        # ASCII only: a message may quote what cannot be encoded, such as half a surrogate pair.
        return Response(json.dumps(body), status, self.headers, "application/json")


class ClientLeft(Exception):
    """The client has closed its connection before it had the answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The error that a client is sent for `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return bad_request(str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return bad_request(str(error), param=_field_of(str(error)))
    if isinstance(error, EngineDied):
        return ApiError(503, str(error), code="engine_died")
    if isinstance(error, RequestFailed):
        if error.kind == "queue":
            return ApiError(429, str(error), code="queue_timeout", headers={"Retry-After": "10"})
        if error.kind == "shutdown":
            return ApiError(503, str(error), code="shutting_down")
        return bad_request(str(error)) if error.kind == "request" else ApiError(500, str(error))
    log.error("The request %s failed.", current_id(), exc_info=error)
    return ApiError(500, "The server failed on this request; its log says why.")


def _field_of(message: str) -> str | None:
    """The field that an error message is about: such a message begins with the field's name."""
    word = re.split(r"\W", message, maxsplit=1)[0]
    return word if word in FIELDS else None


def install_handlers(app: FastAPI) -> None:
    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(Exception, _on_quire_error)


async def _on_quire_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response(request.scope)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _invalid(request, error).response(request.scope)


def _invalid(request: Request, error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        where = f"character {first['loc'][1]}"
        return bad_request(f"The body is no JSON: {first['ctx']['error']} at {where}.")
    if first["loc"] == ("body",):
        is_json = _is_json(request.headers.get("content-type", ""))
        return bad_request(_not_an_object(error.body) if is_json else NOT_SENT_AS_JSON)
    # Behind the field's name come the kinds it might have been, each with its own complaint.
    name = str(first["loc"][1])[:200]
    says = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{name}: {says}."[:1000], param=name)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    headers = dict(error.headers or {})
    address = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 400:
        message = _unreadable(error.__cause__)
    if error.status_code == 404:
        message = f"There is no {address} here; /openapi.json lists what there is."
    if error.status_code == 405:
        message = f"There is no {address} here; use {headers.get('Allow', 'another method')}."
    return ApiError(error.status_code, message, headers=headers).response(request.scope)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind.startswith("application/") and kind.endswith(("/json", "+json"))


def _not_an_object(body: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "a truth value", int: "a number"}
    found = "nothing" if body in (None, b"") else kinds.get(type(body), "something else")
    return f"The body must be one JSON object; {found} came."


def _unreadable(cause: BaseException | None) -> str:
    """Why a body could not be read as JSON at all."""
    if isinstance(cause, UnicodeDecodeError):
        return f"The body is no text in UTF-8: byte {cause.start:,} cannot be read; encode it so."
    if isinstance(cause, RecursionError):
        return "The body has brackets in brackets too deep to be read; nest less."
    return "The body could not be read as JSON; check it."


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
