"""Texts in, steps, vectors out.

    submit ─► waiting, by priority and in turns ─► a step: as many as its tokens allow ─► finish

Every text is computed whole and once, so there is nothing to preempt, resume or share. A request
has one text or many, which may be dealt out to several steps, in turns with other requests. A step
that fails is tried again in halves, until the text that breaks it stands alone and ends.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right, insort
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, NamedTuple

import numpy as np

from quire.config import StepLimits
from quire.engine.limits import EMPTY, Limits, check_vocabulary
from quire.engine.observe.startup import Startup
from quire.engine.pooling.finish import check_params, finish
from quire.engine.pooling.request import PoolingOutput, PoolingRequest, Vectors, pooling_output
from quire.errors import RequestError, in_one_sentence
from quire.histogram import BucketCounts
from quire.models.pooling.facts import PoolingFacts
from quire.models.text.tokenizer import Tokenizer
from quire.pooling_params import PoolingParams
from quire.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.runner.pooling_runner import PoolingRunner
from quire.runner.text_batch import TextBatch
from quire.runner.transfer import Array, Fetch

log = logging.getLogger("quire")

NOT_A_NUMBER = "The model's numbers for this text are not finite; try float32, or another text."


class Share(NamedTuple):
    """Texts of one request that a step computes, by their places in it."""

    request: PoolingRequest
    texts: range


@dataclass(eq=False)
class StepUnderWay:
    shares: list[Share]
    order: Array  # of its texts, on the device
    num_tokens: int
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
        self._again: list[list[Share]] = []  # parts of steps that failed, in order
        self._under_way: list[StepUnderWay] = []  # oldest first
        self._arrivals = count()
        self.num_generated_tokens = 0  # none ever: texts are only read
        self.num_steps = self.num_failed_steps = self.num_computed_tokens = 0
        self.step_tokens = BucketCounts([2**i for i in range(15)])

    # --- requests -----------------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        texts: TextBatch,
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> PoolingRequest:
        """Check texts and their parameters; raises RequestError, and changes nothing."""
        lengths: list[int] = texts.lengths.tolist()
        if not all(lengths):
            raise RequestError(EMPTY)
        check_vocabulary(texts.token_ids, self.limits.vocab_size)
        self.limits.check_text(max(lengths), options)
        check_params(params, self.facts)
        return PoolingRequest(
            request_id,
            texts,
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
            self._waiting.append(request)  # as nearly all

    def abort_request(self, request_id: str) -> PoolingOutput | None:
        """End a request now; None if no such request is open."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.is_aborted = True
        if request.num_begun < len(request.texts):
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
        shares = self._choose()
        if shares:
            ended += self._launch(shares)
        keep = int(self.overlap and bool(shares) and not self._again)
        while len(self._under_way) > keep:
            ended += self._finish(self._under_way.pop(0))
        return [each for each in ended if self._requests.pop(each.id, None) is not None]

    def begin_again(self) -> None:
        """After an interrupt, wherever it struck: what has not ended is computed again."""
        self._under_way.clear()
        self._again.clear()
        unfinished = [each for each in self._requests.values() if not each.finished]
        for request in unfinished:
            request.begin_again()
        self._waiting = sorted(unfinished, key=_order)

    def _choose(self) -> list[Share]:
        """Those that go next, as many as fit; the first goes, however long it is."""
        if self._again:
            return [share for share in self._again.pop(0) if not share.request.is_aborted]
        shares: list[Share] = []
        tokens, texts = self.step_limits
        whole = 0  # requests that are begun to their end
        unfinished: PoolingRequest | None = None
        for request in self._waiting:
            ends, first = request.texts.ends, request.num_begun
            before = ends[first - 1] if first else 0
            last = min(first + texts, bisect_right(ends, before + tokens))
            if not shares:
                last = max(last, first + 1)
            if last <= first:  # less than nothing is left behind one that was longer than a step
                break
            shares.append(Share(request, range(first, last)))
            tokens, texts = tokens - ends[last - 1] + before, texts - last + first
            request.num_begun = last
            if last < len(ends):
                unfinished = request
                break
            whole += 1
        del self._waiting[:whole]
        if unfinished is not None:
            self._put_behind(unfinished)
        return shares

    def _put_behind(self, request: PoolingRequest) -> None:
        """It has had a turn: those of its like that wait come first, however many texts it has."""
        self._waiting.remove(request)
        request.number = next(self._arrivals)
        insort(self._waiting, request, key=_order)

    def _launch(self, shares: list[Share]) -> list[PoolingRequest]:
        now = time.monotonic()
        for request, texts in shares:
            if texts.start == 0:
                request.stages.append(("prefill", now))
        batch = TextBatch.joined([request.texts.part(texts) for request, texts in shares])
        order = np.argsort(batch.lengths, kind="stable")
        try:
            fetch = self.runner.launch(batch.in_order(order))
        except Exception as error:
            return self._fail(shares, error)
        self._under_way.append(StepUnderWay(shares, order, batch.num_tokens, fetch))
        return []

    def _finish(self, step: StepUnderWay) -> list[PoolingRequest]:
        try:
            found = step.fetch.wait()
        except Exception as error:
            return self._fail(step.shares, error)
        self.num_steps += 1
        self.num_computed_tokens += step.num_tokens
        self.step_tokens.add(step.num_tokens)
        vectors = np.empty_like(found)
        vectors[step.order] = found
        first = 0
        for _, alike in groupby(step.shares, lambda share: share.request.params.form):
            shares = list(alike)
            last = first + sum(len(texts) for _, texts in shares)
            self._put(shares, vectors[first:last])
            first = last
        return _ended(step.shares)

    def _put(self, shares: list[Share], vectors: Vectors) -> None:
        """Give the requests what the model computed of texts that ask for the same."""
        unusable = ~np.logical_and.reduce(np.isfinite(vectors), axis=1)
        vectors[unusable] = 0
        bad = set(np.flatnonzero(unusable).tolist())
        finished = finish(vectors, shares[0].request.params, self.facts)
        first = 0
        for request, texts in shares:
            rows = range(first, first + len(texts))
            for row in bad.intersection(rows):
                request.errors[texts[row - first]] = NOT_A_NUMBER
            request.put(texts, finished[rows.start : rows.stop])
            first = rows.stop

    def _fail(self, shares: list[Share], error: Exception) -> list[PoolingRequest]:
        """Have them computed again in two halves; one that is alone ends."""
        self.num_failed_steps += 1
        self.runner.free_memory()
        count = sum(len(share.texts) for share in shares)
        if count > 1:
            log.warning("A step failed (%s); its halves are tried.", type(error).__name__)
            self._again += _halves(shares, count // 2)
            return []
        log.error("A text could not be computed.", exc_info=error)
        [(request, [text])] = shares
        request.fail(text, in_one_sentence(error))
        return _ended(shares)

    # --- what is going on -----------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended the engine, if anything has: it has no other processes."""

    def close(self) -> None:
        """Let go of what lasts longer than the engine: nothing."""

    def stats(self) -> dict[str, Any]:
        return {
            "requests": {
                "running": sum(each.num_begun > 0 for each in self._requests.values()),
                "loading": 0,
                "waiting": sum(each.num_begun == 0 for each in self._waiting),
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


def _ended(shares: list[Share]) -> list[PoolingRequest]:
    ended = [request for request, _ in shares if request.finished]
    now = time.monotonic()
    for request in ended:
        request.stages.append(("finished", now))
    return ended


def _halves(shares: list[Share], middle: int) -> list[list[Share]]:
    """The first `middle` texts, and the others."""
    halves: tuple[list[Share], list[Share]] = [], []
    for request, texts in shares:
        for half, part in zip(halves, (texts[:middle], texts[middle:]), strict=True):
            if part:
                half.append(Share(request, part))
        middle = max(0, middle - len(texts))
    return list(halves)
