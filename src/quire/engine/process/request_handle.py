"""One request as its caller sees it: its updates, merged until the caller takes them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from quire.engine.pooling.request import Vectors
from quire.engine.process.messages import RequestUpdate, SampleUpdate, unpack_vectors
from quire.errors import QuireError


class EngineDied(QuireError):
    """The engine's process ended while it was needed."""


class RequestFailed(QuireError):
    """A request ended without its answer; `kind` is "request", "queue", "shutdown" or "engine"."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Sample:
    """What one sample has gained since the last update."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of a beam

    def add(self, update: SampleUpdate) -> None:
        self.token_ids += update["token_ids"]
        self.logprobs += update.get("logprobs", [])
        self.finish_reason = update.get("finish_reason")
        self.stop_reason = update.get("stop_reason")
        if "score" in update:
            self.scores = {
                "score": update["score"],
                "cumulative_logprob": update["cumulative_logprob"],
            }

    def each_token(self) -> list[Sample]:
        """The same in parts of one token; how it ended is said with the last."""
        entries = [[entry] for entry in self.logprobs] or [[] for _ in self.token_ids]
        pairs = zip(self.token_ids, entries, strict=True)
        parts = [Sample([token_id], entry) for token_id, entry in pairs]
        last = parts.pop() if parts else Sample()
        last.finish_reason, last.stop_reason = self.finish_reason, self.stop_reason
        return [*parts, last]


@dataclass
class Admission:
    """What the scheduler knew when the request first got its blocks."""

    num_cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    waited_s: float = 0.0


@dataclass
class Ending:
    """What the engine says of a request that it has ended; times are `time.monotonic()`'s."""

    output_tokens: int  # of all samples
    longest_sample: int  # tokens of the one that has most
    finish_reason: str
    stages: list[tuple[str, float]]


@dataclass
class Update:
    samples: dict[int, Sample] = field(default_factory=dict)
    prompt_logprobs: list[list[Any]] = field(default_factory=list)
    pooled: Vectors | None = None
    finished: bool = False


class RequestHandle:
    """`changed` is set when `take` has something; several handles may share one event."""

    def __init__(self, number: int, num_prompt_tokens: int, changed: asyncio.Event) -> None:
        self.number = number
        self.engine = ""  # the name of the engine that computes it
        self.num_prompt_tokens = num_prompt_tokens
        self.admission: Admission | None = None
        self.arrived = time.monotonic()
        self.finished = False
        self.first_update_at: float | None = None
        self.finished_at: float | None = None
        self.ending: Ending | None = None
        self.changed = changed
        self.was_read = False  # whether an update was taken
        self._unread: Update | None = None
        self._error: QuireError | None = None

    @property
    def error(self) -> str | None:
        return None if self._error is None else str(self._error)

    def take(self) -> Update | None:
        """What has come since the last call; raises RequestFailed or EngineDied."""
        if self._error is not None:
            raise self._error
        update, self._unread = self._unread, None
        self.was_read = self.was_read or update is not None
        return update

    # --- for the link to the engine ------------------------------------------------------------

    def draw(self, sample: int, token_id: int) -> None:
        samples = self._pending().samples
        if sample not in samples:
            samples[sample] = Sample()
        samples[sample].token_ids.append(token_id)

    def add(self, update: RequestUpdate) -> None:
        if "admitted" in update:
            self.admission = Admission(**update["admitted"])
        if "ended" in update:
            self.ending = Ending(**update["ended"])
        if "error" in update:
            self.fail(RequestFailed(update["error"], update["error_kind"]))
            return
        if "pooled" in update:
            self._pending().pooled = unpack_vectors(update["pooled"])
        for sample in update.get("samples", ()):
            self._pending().samples.setdefault(sample["sample"], Sample()).add(sample)
        if judged := update.get("prompt_logprobs"):
            self._pending().prompt_logprobs += judged
        if update.get("finished"):
            self._pending().finished = True
            self._finish()

    def begin_again(self) -> None:
        """The engine is gone, and another one computes the request; no update was taken yet."""
        assert not self.was_read and not self.finished
        self.admission, self.first_update_at, self._unread = None, None, None

    def fail(self, error: QuireError) -> None:
        self._error = error
        self._finish()
        self.changed.set()

    def _finish(self) -> None:
        self.finished = True
        self.finished_at = time.monotonic()

    def _pending(self) -> Update:
        if self._unread is None:
            self._unread = Update()
            if self.first_update_at is None:
                self.first_update_at = time.monotonic()
            self.changed.set()
        return self._unread
