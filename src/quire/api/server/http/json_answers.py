"""Answers in JSON."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # made once


def as_json(message: Any) -> bytes:
    """In UTF-8. Models and clients may say half a character, which has an escape in JSON alone."""
    return _encode(message).encode(errors="backslashreplace")


class JsonAnswer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return as_json(content)
