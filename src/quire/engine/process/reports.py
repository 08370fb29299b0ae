"""What is new about the open requests, gathered until it can be sent."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from quire.engine.outputs import returned
from quire.engine.pooling.request import Vectors
from quire.engine.process.messages import Message, RequestUpdate, SampleUpdate, pack_vectors
from quire.engine.sequence import Request, Sequence
from quire.request_options import RequestOptions
from quire.runner.sampling.sampler import Logprobs


class Opened(ABC):
    """A request that has come, whatever it asks for."""

    def __init__(self, number: int, options: RequestOptions) -> None:
        self.number = number
        self.arrived = time.monotonic()
        # When it fails if it has not been admitted.
        self.deadline = None if options.queue_s is None else self.arrived + options.queue_s

    @property
    @abstractmethod
    def is_admitted(self) -> bool: ...

    def cached(self) -> Message:
        """What was known of its prompt when it was admitted."""
        return {}


class OpenRequest(Opened):
    """How far one request has been reported."""

    def __init__(self, number: int, request: Request, options: RequestOptions) -> None:
        super().__init__(number, options)
        self.request = request
        self.wait_for_store = options.wait_for_store
        self.num_sent: dict[int, int] = {}  # tokens, by sample
        self.ended: set[int] = set()  # samples whose end was told
        self.num_scored = 0  # prompt logprobs
        # Only plain tokens go the short way; how a sample ends is always told in full.
        self.is_plain = request.params.logprobs is None and request.params.prompt_logprobs is None

    @property
    def is_admitted(self) -> bool:
        return self.request.num_cached_tokens is not None

    def cached(self) -> Message:
        request = self.request
        return {
            "num_cached_tokens": request.num_cached_tokens or 0,
            "cached_tokens_by_tier": request.cached_tokens_by_tier,
            "miss_reason": request.miss_reason,
        }


class Reports:
    """Updates wait here while the other side is slow; those of one request are merged."""

    def __init__(self) -> None:
        self._drawn: list[int] = []
        self._updates: dict[int, RequestUpdate] = {}
        self._answers: list[Message] = []

    def __bool__(self) -> bool:
        return bool(self._drawn or self._updates or self._answers)

    def take(self) -> Message:
        message: Message = {}
        if self._drawn:
            message["drawn"] = self._drawn
        if self._updates:
            message["updates"] = list(self._updates.values())
        if self._answers:
            message["answers"] = self._answers
        self._drawn, self._updates, self._answers = [], {}, []
        return message

    def answer(self, number: int, **result: Any) -> None:
        self._answers.append({"number": number, **result})

    def admit(self, opened: Opened, now: float) -> None:
        waited = max(0.0, now - opened.arrived)
        self._of(opened.number)["admitted"] = {**opened.cached(), "waited_s": waited}

    def pooled(self, number: int, vectors: Vectors, stages: list[tuple[str, float]]) -> None:
        """The vectors of a request's texts, with which it ends."""
        update = self._of(number)
        update["pooled"] = pack_vectors(vectors)
        update["finished"] = True
        counts = {"output_tokens": 0, "longest_sample": 0}
        update["ended"] = {**counts, "finish_reason": "stop", "stages": stages}

    def fail(self, number: int, error: str, kind: str) -> None:
        update = self._of(number)
        update["error"], update["error_kind"], update["finished"] = error, kind, True

    def grow(self, open_request: OpenRequest) -> None:
        """Add what `open_request` has gained since it was last reported."""
        request = open_request.request
        if len(request.prompt_logprobs) > open_request.num_scored:
            scored = request.prompt_logprobs[open_request.num_scored :]
            open_request.num_scored = len(request.prompt_logprobs)
            update = self._of(open_request.number)
            update.setdefault("prompt_logprobs", []).extend(map(_plain, scored))
        for sample, sequence in enumerate(returned(request)):
            self._grow_sample(open_request, sample, sequence)
        if request.finished:
            update = self._of(open_request.number)
            update["finished"], update["ended"] = True, _ending(request)
            if request.error is not None:
                kind = "request" if request.is_at_fault else "engine"
                self.fail(open_request.number, request.error, kind)

    def _grow_sample(self, open_request: OpenRequest, sample: int, sequence: Sequence) -> None:
        sent, count = open_request.num_sent.get(sample, 0), sequence.num_output
        reason = sequence.finish_reason
        if sample in open_request.ended or (count == sent and reason is None):
            return
        open_request.num_sent[sample] = count
        token_ids: list[int] = sequence.output_ids[sent:].tolist()
        merged = self._updates.get(open_request.number)
        if open_request.is_plain and reason is None and (merged is None or "samples" not in merged):
            for token_id in token_ids:
                self._drawn += (open_request.number, sample, token_id)
            return
        update = self._sample(open_request.number, sample)
        update["token_ids"] += token_ids
        if sequence.params.logprobs is not None:
            update.setdefault("logprobs", []).extend(map(_plain, sequence.logprobs[sent:count]))
        if reason is not None:
            open_request.ended.add(sample)
            update["finish_reason"] = reason
            if reason == "stop":
                update["stop_reason"] = _stop_reason(sequence)
            if sequence.score is not None:
                update["score"] = sequence.score
                update["cumulative_logprob"] = sequence.cumulative_logprob

    def _of(self, number: int) -> RequestUpdate:
        return self._updates.setdefault(number, {"number": number})

    def _sample(self, number: int, sample: int) -> SampleUpdate:
        samples = self._of(number).setdefault("samples", [])
        for update in samples:
            if update["sample"] == sample:
                return update
        samples.append({"sample": sample, "token_ids": []})
        return samples[-1]


def _ending(request: Request) -> Message:
    """For metrics, logs and spans."""
    counts = [sequence.num_output for sequence in request.sequences]
    return {
        "output_tokens": sum(counts),
        "longest_sample": max(counts),
        "finish_reason": request.sequences[0].finish_reason,
        "stages": request.stages,
    }


def _plain(logprobs: Logprobs) -> list[Any]:
    return [logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs]


def _stop_reason(sequence: Sequence) -> int | str | None:
    detokenizer = sequence.detokenizer
    if detokenizer is not None and detokenizer.stop is not None:
        return detokenizer.stop
    # Without such a token its form was complete.
    return int(sequence.output_ids[-1]) if sequence.ended_by_token else None
