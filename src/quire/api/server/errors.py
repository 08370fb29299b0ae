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

from quire.engine.process.ticket import EngineDied, RequestFailed
from quire.errors import PromptTooLong, QuireError, RequestError
from quire.params import SamplingParams

log = logging.getLogger("quire.server")

TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


FIELDS = {*SamplingParams.__dataclass_fields__, "priority", "tools", "tool_choice"}
NO_JSON = "The body must be one JSON object, sent with `Content-Type: application/json`."


class ApiError(QuireError):
    """An answer that is no answer: status, one sentence, and OpenAI's `code` and `param`."""

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
        return {
            "error": {
                "message": str(self),
                "type": TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        # ASCII only: a message may quote what cannot be encoded, such as half a surrogate pair.
        content = json.dumps(self.body())
        return Response(content, self.status, self.headers, "application/json")


class ClientLeft(Exception):
    """Nobody is there to read the answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`."""
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
    log.error("A request failed.", exc_info=error)
    return ApiError(500, "The server failed on this request; its log says why.")


def _field_of(message: str) -> str | None:
    """A sentence about a field begins with its name."""
    word = re.split(r"\W", message, maxsplit=1)[0]
    return word if word in FIELDS else None


def install_handlers(app: FastAPI) -> None:
    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(Exception, _on_quire_error)


async def _on_quire_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        where = f"character {first['loc'][1]}"
        return bad_request(f"The body is no JSON: {first['ctx']['error']} at {where}.").response()
    if first["loc"] == ("body",):
        return bad_request(NO_JSON).response()
    # Behind the field's name come the kinds it might have been, each with its own complaint.
    name = str(first["loc"][1])[:200]
    says = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{name}: {says}."[:1000], param=name).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 400:  # bytes that are no text, or brackets without end
        message = NO_JSON
    if error.status_code == 404:
        address = f"{request.method} {request.url.path[:200]}"
        message = f"There is no {address} here; /openapi.json lists what there is."
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, headers=headers).response()


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
