"""One request as those who wait for it see it: its news, merged until they are taken."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from quire.engine.process.messages import RequestNews, SampleNews
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
    """What is new of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of a beam

    def add(self, news: SampleNews) -> None:
        self.token_ids += news["token_ids"]
        self.logprobs += news.get("logprobs", [])
        self.finish_reason = news.get("finish_reason")
        self.stop_reason = news.get("stop_reason")
        if "score" in news:
            self.scores = {
                "score": news["score"],
                "cumulative_logprob": news["cumulative_logprob"],
            }


@dataclass
class Admission:
    """What was known when the request first got its blocks."""

    num_cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    waited_s: float = 0.0


@dataclass
class Ending:
    """What the engine says of a request that it has ended; times are `time.monotonic()`'s."""

    output_tokens: int
    finish_reason: str
    stages: list[tuple[str, float]]


@dataclass
class Update:
    samples: dict[int, Sample] = field(default_factory=dict)
    prompt_logprobs: list[list[Any]] = field(default_factory=list)
    finished: bool = False


class RequestHandle:
    """`changed` is set when `take` has something; several tickets may share one event."""

    def __init__(self, number: int, num_prompt_tokens: int, changed: asyncio.Event) -> None:
        self.number = number
        self.engine = ""  # the name of the one that has it
        self.num_prompt_tokens = num_prompt_tokens
        self.admission: Admission | None = None
        self.arrived = time.monotonic()
        self.finished = False
        self.first_news_at: float | None = None
        self.finished_at: float | None = None
        self.ending: Ending | None = None
        self.changed = changed
        self.was_read = False  # some of its news are with those who wait for it
        self._news: Update | None = None
        self._error: QuireError | None = None

    @property
    def error(self) -> str | None:
        return None if self._error is None else str(self._error)

    def take(self) -> Update | None:
        """What has come since the last call; raises RequestFailed or EngineDied."""
        if self._error is not None:
            raise self._error
        news, self._news = self._news, None
        self.was_read = self.was_read or news is not None
        return news

    # --- the client's side ---------------------------------------------------------------------

    def draw(self, sample: int, token_id: int) -> None:
        samples = self._pending().samples
        if sample not in samples:
            samples[sample] = Sample()
        samples[sample].token_ids.append(token_id)

    def add(self, news: RequestNews) -> None:
        if "admitted" in news:
            self.admission = Admission(**news["admitted"])
        if "ended" in news:
            self.ending = Ending(**news["ended"])
        if "error" in news:
            self.fail(RequestFailed(news["error"], news["error_kind"]))
            return
        for sample in news.get("samples", ()):
            self._pending().samples.setdefault(sample["sample"], Sample()).add(sample)
        if judged := news.get("prompt_logprobs"):
            self._pending().prompt_logprobs += judged
        if news.get("finished"):
            self._pending().finished = True
            self._finish()

    def begin_again(self) -> None:
        """Its engine is gone, and another is to answer; nobody has read what there was."""
        assert not self.was_read and not self.finished
        self.admission, self.first_news_at, self._news = None, None, None

    def fail(self, error: QuireError) -> None:
        self._error = error
        self._finish()
        self.changed.set()

    def _finish(self) -> None:
        self.finished = True
        self.finished_at = time.monotonic()

    def _pending(self) -> Update:
        if self._news is None:
            self._news = Update()
            if self.first_news_at is None:
                self.first_news_at = time.monotonic()
            self.changed.set()
        return self._news
