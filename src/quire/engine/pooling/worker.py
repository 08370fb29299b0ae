"""The worker of an engine that pools, in its process."""

from __future__ import annotations

import time
from dataclasses import asdict

import numpy as np

from quire.engine.limits import WRITES_NO_TEXT
from quire.engine.pooling.engine import PoolingEngine
from quire.engine.pooling.request import PoolingRequest, TextsAsked
from quire.engine.process.link import Link
from quire.engine.process.messages import Message, unpack_ids, unpack_params
from quire.engine.process.reports import Opened
from quire.engine.process.worker_loop import WorkerLoop
from quire.errors import RequestError
from quire.request_options import RequestOptions
from quire.runner.text_batch import TextBatch


class OpenTexts(Opened):
    def __init__(self, number: int, request: PoolingRequest, options: RequestOptions) -> None:
        super().__init__(number, options)
        self.request = request

    @property
    def is_admitted(self) -> bool:
        return self.request.num_begun > 0


class PoolingWorker(WorkerLoop[OpenTexts]):
    def __init__(self, engine: PoolingEngine, link: Link) -> None:
        super().__init__(link)
        self.engine = engine
        self.calls["stats"] = self.stats

    def stats(self) -> Message:
        return {**self.engine.stats(), "busy_seconds": self.busy_s}

    def _add(self, number: int, prompt: str, params: Message, options: RequestOptions) -> OpenTexts:
        asked = unpack_params(params)
        if not isinstance(asked, TextsAsked):
            raise RequestError(WRITES_NO_TEXT)
        ids = np.split(unpack_ids(prompt), np.cumsum(asked.lengths[:-1]))
        texts = TextBatch.of(ids, asked.seconds)
        request = self.engine.make_request(str(number), texts, asked.params, options)
        self.engine.submit(request)
        return OpenTexts(number, request, options)

    def _abort(self, number: int) -> None:
        self.engine.abort_request(str(number))

    def _advance(self) -> None:
        started = time.monotonic()
        ended = self.engine.advance()
        if self._queued:
            self._tell_admitted(started)
        for request in ended:
            opened = self._forget(int(request.id))
            if opened is None:
                continue
            if request.vectors is None or request.errors:
                first = request.errors[min(request.errors)]
                self._reports.fail(opened.number, first, "engine")
            else:
                self._reports.pooled(opened.number, request.vectors, request.stages)


def describe_pooling(engine: PoolingEngine) -> Message:
    """What the other process needs to know of the model: its words, and what it can take."""
    return {
        "limits": asdict(engine.limits),
        "eos_token_ids": [],
        "tokenizer": None if engine.tokenizer is None else engine.tokenizer.to_plain(),
        "namespace": None,
        "num_blocks": 0,
        "pooling": asdict(engine.facts),
    }
