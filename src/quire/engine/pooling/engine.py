"""Texts in, steps, vectors out.

    submit ─► waiting, by priority and arrival ─► a step: as many as its tokens allow ─► finish

Every text is computed whole and once, so there is nothing to preempt, resume or share. A step that
fails is tried again in halves, until the text that breaks it stands alone and ends.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from quire.config import StepLimits
from quire.engine.limits import Limits, checked_ids
from quire.engine.observe.startup import Startup
from quire.engine.pooling.finish import check_params, finish
from quire.engine.pooling.request import PoolingOutput, PoolingRequest, pooling_output
from quire.errors import RequestError, in_one_sentence
from quire.histogram import BucketCounts
from quire.kv.index import TokenIds
from quire.models.pooling.facts import PoolingFacts
from quire.models.text.tokenizer import Tokenizer
from quire.pooling_params import PoolingParams
from quire.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.runner.pooling_batch import TextBatch
from quire.runner.pooling_runner import PoolingRunner
from quire.runner.transfer import Fetch

log = logging.getLogger("quire")

NOT_A_NUMBER = "The model's numbers for this text are not finite; try float32, or another text."


@dataclass(eq=False)
class StepUnderWay:
    requests: list[PoolingRequest]
    fetch: Fetch


class PoolingEngine:
    """Owns the requests; `submit` and `abort_request` between calls of `step`."""

    def __init__(
        self,
        runner: PoolingRunner,
        facts: PoolingFacts,
        limits: Limits,
        step_limits: StepLimits,
        tokenizer: Tokenizer | None = None,
        overlap: bool = False,
        startup: Startup | None = None,
    ) -> None:
        """With `overlap` a step is launched while the one before it runs."""
        self.runner = runner
        self.facts = facts
        self.limits = limits
        self.step_limits = step_limits
        self.tokenizer = tokenizer
        self.overlap = overlap
        self.startup = startup or Startup()
        self._requests: dict[str, PoolingRequest] = {}
        self._waiting: list[PoolingRequest] = []
        self._again: list[list[PoolingRequest]] = []  # parts of steps that failed, in order
        self._under_way: list[StepUnderWay] = []  # oldest first
        self._arrivals = count()
        self.num_generated_tokens = 0  # none ever: texts are only read
        self.num_steps = self.num_failed_steps = self.num_computed_tokens = 0
        self.step_tokens = BucketCounts([2**i for i in range(15)])

    # --- requests -----------------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        prompt: Sequence[int] | TokenIds,
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> PoolingRequest:
        """Check a text and its parameters; raises RequestError, and changes nothing."""
        token_ids = checked_ids(prompt, self.limits.vocab_size)
        self.limits.check_text(token_ids, options)
        check_params(params, self.facts)
        return PoolingRequest(
            request_id,
            token_ids,
            params,
            options.priority,
            options.name,
            options.background,
            options.turn,
        )

    def submit(self, request: PoolingRequest) -> None:
        if request.id in self._requests:
            raise RequestError(f"A request {request.id!r} is already running; use another id.")
        request.number = next(self._arrivals)
        request.stages.append(("queued", time.monotonic()))
        self._requests[request.id] = request
        if self._waiting and _order(self._waiting[-1]) > _order(request):
            insort(self._waiting, request, key=_order)
        else:
            self._waiting.append(request)  # as nearly all: thousands may come at once

    def abort_request(self, request_id: str) -> PoolingOutput | None:
        """End a request now; None if no such request is open."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.is_aborted = True
        if not request.is_begun:
            self._waiting.remove(request)
        return pooling_output(request)

    def find_request(self, request_id: str) -> PoolingRequest | None:
        """None if it has ended."""
        return self._requests.get(request_id)

    def output(self, request: PoolingRequest) -> PoolingOutput:
        return pooling_output(request)

    # --- steps --------------------------------------------------------------------------------

    def step(self) -> list[PoolingOutput]:
        """Launch a step and finish one; with overlap, that is the one before."""
        return [pooling_output(request) for request in self.advance()]

    def advance(self) -> list[PoolingRequest]:
        """The requests that have ended."""
        ended: list[PoolingRequest] = []
        requests = self._choose()
        if requests:
            ended += self._launch(requests)
        keep = int(self.overlap and bool(requests) and not self._again)
        while len(self._under_way) > keep:
            ended += self._finish(self._under_way.pop(0))
        return [each for each in ended if self._requests.pop(each.id, None) is not None]

    def begin_again(self) -> None:
        """After an interrupt, wherever it struck: what has not ended is computed again."""
        self._under_way.clear()
        self._again.clear()
        unfinished = [each for each in self._requests.values() if not each.finished]
        for request in unfinished:
            request.is_begun = False
        self._waiting = sorted(unfinished, key=_order)

    def _choose(self) -> list[PoolingRequest]:
        """Those that go next, as many as fit; the first goes, however long it is."""
        if self._again:
            return [each for each in self._again.pop(0) if not each.is_aborted]
        chosen: list[PoolingRequest] = []
        tokens = 0
        for request in self._waiting[: self.step_limits.sequences]:
            tokens += len(request.prompt_ids)
            if chosen and tokens > self.step_limits.tokens:
                break
            chosen.append(request)
        del self._waiting[: len(chosen)]
        return chosen

    def _launch(self, requests: list[PoolingRequest]) -> list[PoolingRequest]:
        now = time.monotonic()
        for request in requests:
            request.is_begun = True
            request.stages.append(("prefill", now))
        requests = sorted(requests, key=lambda each: len(each.prompt_ids))
        batch = TextBatch(
            [each.prompt_ids for each in requests], [each.params.second_text for each in requests]
        )
        try:
            step = StepUnderWay(requests, self.runner.launch(batch))
        except Exception as error:
            return self._fail(requests, error)
        self._under_way.append(step)
        return []

    def _finish(self, step: StepUnderWay) -> list[PoolingRequest]:
        try:
            vectors = step.fetch.wait()
        except Exception as error:
            return self._fail(step.requests, error)
        now = time.monotonic()
        self.num_steps += 1
        tokens = sum(len(each.prompt_ids) for each in step.requests)
        self.num_computed_tokens += tokens
        self.step_tokens.add(tokens)
        usable = np.logical_and.reduce(np.isfinite(vectors), axis=1)
        for request, vector, is_usable in zip(step.requests, vectors, usable, strict=True):
            if is_usable:
                request.result = finish(vector, request.params, self.facts)
            else:
                request.error = NOT_A_NUMBER
            request.stages.append(("finished", now))
        return step.requests

    def _fail(self, requests: list[PoolingRequest], error: Exception) -> list[PoolingRequest]:
        """Have them computed again in two halves; one that is alone ends."""
        self.num_failed_steps += 1
        self.runner.free_memory()
        if len(requests) > 1:
            log.warning("A step failed (%s); its halves are tried.", type(error).__name__)
            middle = len(requests) // 2
            self._again += [requests[:middle], requests[middle:]]
            return []
        log.error("A text could not be computed.", exc_info=error)
        requests[0].error = in_one_sentence(error)
        requests[0].stages.append(("finished", time.monotonic()))
        return requests

    # --- what is going on -----------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended the engine, if anything has: it has no other processes."""

    def close(self) -> None:
        """Let go of what lasts longer than the engine: nothing."""

    def stats(self) -> dict[str, Any]:
        return {
            "requests": {
                "running": sum(each.is_begun for each in self._requests.values()),
                "loading": 0,
                "waiting": len(self._waiting),
            },
            "startup_seconds": dict(self.startup.seconds),
            "steps": self.num_steps,
            "step_tokens": self.step_tokens.as_dict(),
            "tokens": {"computed": self.num_computed_tokens},
            "prefix": {"queries": self.num_computed_tokens},
            "recovery": {
                "failed_steps": self.num_failed_steps,
                "token_budget": self.step_limits.tokens,
            },
        }


def _order(request: PoolingRequest) -> tuple[bool, int, int, int]:
    return request.is_background, request.priority, request.turn, request.number
