"""The lines of a batch's input, read one at a time, whatever is in them.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "…"}}

A line that is no such request has an `error`, which becomes its result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

MAX_CUSTOM_ID = 512  # characters
CHUNK = 1 << 20


@dataclass(frozen=True)
class LineError:
    code: str
    message: str


@dataclass(frozen=True)
class InputLine:
    number: int  # in the file, from 1
    digest: str  # of its bytes: another line in the same place has another
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: LineError | None = None

    @property
    def result_id(self) -> str:
        """The id of its result, by which a run that goes on later knows that it is answered."""
        return f"batch_req_{self.digest}_{self.number}"


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as file:
        return sum(1 for start in _line_starts(file) if start.strip())


def _line_starts(file: BinaryIO) -> Iterator[bytes]:
    """The beginning of each line: a line without end takes no more memory than another."""
    while piece := file.readline(CHUNK):
        yield piece
        while len(piece) == CHUNK and not piece.endswith(b"\n"):
            piece = file.readline(CHUNK)


def read_lines(path: Path, max_bytes: int) -> Iterator[InputLine]:
    """The requests of a file; a line of more than `max_bytes` is not kept in memory."""
    with path.open("rb") as file:
        number = 0
        while data := file.readline(max_bytes + 1):
            number += 1
            if len(data) > max_bytes and not data.endswith(b"\n"):
                yield _too_long(file, number, data, max_bytes)
            elif data.strip():
                yield parse_line(number, data)


def _too_long(file: BinaryIO, number: int, data: bytes, max_bytes: int) -> InputLine:
    digest = hashlib.sha256(data)
    while not data.endswith(b"\n") and (data := file.readline(CHUNK)):
        digest.update(data)
    error = LineError("line_too_long", f"The line has more than {max_bytes:,} bytes; send less.")
    return InputLine(number, digest.hexdigest()[:16], error=error)


def parse_line(number: int, data: bytes) -> InputLine:
    digest = hashlib.sha256(data.rstrip(b"\r\n")).hexdigest()[:16]
    try:
        request = json.loads(data)
    except (ValueError, RecursionError) as why:
        says = f"The line is no JSON: {why}"[:500].rstrip(".") + "."
        return InputLine(number, digest, error=LineError("invalid_json_line", says))
    custom_id = request.get("custom_id") if isinstance(request, dict) else None
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        says = f"A line is an object with a custom_id of 1 to {MAX_CUSTOM_ID} characters."
        return InputLine(number, digest, error=LineError("invalid_custom_id", says))
    if (error := _mistake(request)) is not None:
        return InputLine(number, digest, custom_id, error=error)
    return InputLine(number, digest, custom_id, request["url"], request["body"])


def _mistake(request: dict[str, Any]) -> LineError | None:
    body = request.get("body")
    if request.get("method", "POST") != "POST":
        return LineError("invalid_method", "The method of a line is POST.")
    if not isinstance(request.get("url"), str):
        return LineError("invalid_url", "A line has a url such as /v1/chat/completions.")
    if not isinstance(body, dict):
        return LineError("invalid_body", "A line has a body, which is an object.")
    if body.get("stream"):
        return LineError("invalid_body", "A batch does not stream; leave stream out.")
    if body.get("background"):
        return LineError("invalid_body", "A batch is in the background; leave background out.")
    return None
