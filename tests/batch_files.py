"""Files of requests and of results, as batches read and write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BAD_LINES = [
    "no json",
    "[1, 2]",
    '{"custom_id": ""}',
    '{"custom_id": "bad-body", "url": "/v1/completions"}',
    '{"custom_id": "bad-url", "url": "/v1/nothing", "body": {}}',
    '{"custom_id": "bad-method", "method": "GET", "url": "/v1/completions", "body": {}}',
    '{"custom_id": "bad-stream", "url": "/v1/completions", "body": {"stream": true}}',
    '{"custom_id": "bad-prompt", "url": "/v1/completions", "body": {"prompt": 5}}',
    '{"custom_id": "bad-number", "url": "/v1/completions", "body": {"prompt": "a", "top_p": -1}}',
    '{"custom_id": "bad-model", "url": "/v1/completions", "body": {"prompt": "a", "model": "b"}}',
]


def request(custom_id: str, prompt: str, **body: Any) -> str:
    """A line that asks for a short completion."""
    asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked}
    return json.dumps(line)


def write_requests(path: Path, count: int) -> Path:
    lines = (request(f"line-{i}", f"Number {i}") for i in range(count))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def results_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids_in(path: Path) -> list[str]:
    """The custom ids of the whole results in a file that may still be written."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["custom_id"] for line in lines]
