"""One line of JSON for each request that has ended, on the logger `quire.requests`."""

from __future__ import annotations

import json
import logging
from typing import Any

from quire.metrics.record import RequestRecord

log = logging.getLogger("quire.requests")


def write_bare_lines() -> None:
    """To standard error, with nothing around the JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False


def log_request(record: RequestRecord) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", json.dumps(as_line(record), separators=(",", ":")))


def as_line(record: RequestRecord) -> dict[str, Any]:
    """What is known; names that have nothing to say are left out."""
    cached = record.cached_tokens_by_tier
    line = {
        "request": record.id,
        "number": record.number,
        "tenant": record.tenant or None,
        "adapter": record.adapter or None,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "cached_tokens": sum(cached.values()),
        "cached_by_tier": cached or None,
        "missed": record.miss_reason,
        "finish_reason": record.finish_reason,
        "first_token_s": _rounded(record.time_to_first_token),
        "seconds": _rounded(record.seconds),
        "stages": {name: _rounded(each) for name, each in record.seconds_in().items()} or None,
        "error": record.error,
    }
    return {name: value for name, value in line.items() if value is not None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
