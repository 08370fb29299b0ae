"""One answer as it streams in: when its tokens came, and how it ended."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

# A later token's event is known by its bytes, without parsing it: inside of a JSON string these
# quotes would have backslashes.
MORE = b'"finish_reason":null'
MORE_WITH_A_SPACE = b'"finish_reason": null'
LONGEST_EVENT = 16 << 20  # bytes
ODD = "odd event"
CONTENTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


@dataclass
class Outcome:
    """What became of one request; times in seconds."""

    at: float  # when it was to be sent, after the start
    num_asked: int  # tokens
    late: float = 0.0  # how much later it was sent
    first: float | None = None  # to the first token, from `at` on, as all that follow
    last: float = 0.0  # to the last token
    total: float | None = None  # to the end, once it has ended
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between chunks of tokens
    num_in: int = 0
    num_out: int = 0
    num_cached: int = 0
    error: str | None = None  # its kind
    message: str = ""

    def fail(self, kind: str, message: str = "") -> None:
        if self.error is None:
            self.error, self.message = kind, message


class Answer:
    """Takes the bytes of a stream of server-sent events; `outcome` is what they say."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._rest = b""
        self._finished = False

    def feed(self, data: bytes, now: float) -> None:
        self._rest += data
        if b"\r" in self._rest:
            self._rest = self._rest.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            self._take(event, now)
        if len(self._rest) > LONGEST_EVENT:
            self.outcome.fail(ODD, "an event has no end")
            self._rest = b""

    def close(self) -> None:
        if not self._finished:
            self.outcome.fail("cut short", "the stream ended without a finish_reason")

    def _take(self, event: bytes, now: float) -> None:
        if event.startswith(b"data:") and b"\n" not in event:
            payload = event[5:]
        else:
            lines = event.split(b"\n")
            payload = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
        if self.outcome.first is not None and (MORE in payload or MORE_WITH_A_SPACE in payload):
            self._count(now)
        elif payload.strip() not in (b"", b"[DONE]"):
            self._read(payload, now)

    def _count(self, now: float) -> None:
        """A chunk of one token, or of several that came together."""
        outcome = self.outcome
        if outcome.first is None:
            outcome.first = now
        else:
            outcome.gaps.append(now - outcome.last)
        outcome.last = now

    def _read(self, payload: bytes, now: float) -> None:
        try:
            self._interpret(json.loads(payload), now)
        except (ValueError, AttributeError, TypeError, RecursionError):
            self.outcome.fail(ODD, repr(payload[:100]))

    def _interpret(self, event: dict[str, Any], now: float) -> None:
        if error := event.get("error"):
            self.outcome.fail("error in the stream", message_of(error))
        if usage := event.get("usage"):
            self._take_usage(usage)
        for choice in event.get("choices") or ():
            ended = choice.get("finish_reason")
            if _has_token(choice, ended):
                self._count(now)
            if ended == "error":
                self.outcome.fail("error in the stream", "finish_reason is error")
            self._finished = self._finished or ended is not None

    def _take_usage(self, usage: dict[str, Any]) -> None:
        outcome = self.outcome
        outcome.num_in = int(usage.get("prompt_tokens") or 0)
        outcome.num_out = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        outcome.num_cached = int(details.get("cached_tokens") or 0)


def _has_token(choice: dict[str, Any], ended: str | None) -> bool:
    """A text may be empty while a character is not complete; an event of the role has no token."""
    if choice.get("token_ids"):
        return True
    if "delta" in choice:
        delta = choice["delta"] or {}
        return any(delta.get(name) for name in CONTENTS)
    return bool(choice.get("text")) or ended is None


def message_of(error: Any) -> str:
    """The sentence in an error, whichever shape it has."""
    while isinstance(error, dict):
        inner = (error[name] for name in ("error", "message", "detail") if error.get(name))
        error = next(inner, str(error))
    return str(error)
