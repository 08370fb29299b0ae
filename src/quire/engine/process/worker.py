"""The engine's process, and the worker of an engine that generates.

When the other process is gone, or says so, everything ends in order: what is on its way to a lower
tier is written first.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.limits import WRITES_TEXT
from quire.engine.observe.adapter_calls import AdapterCalls
from quire.engine.observe.cache_control import CacheCalls
from quire.engine.observe.introspection import engine_stats, views
from quire.engine.pooling.engine import PoolingEngine
from quire.engine.pooling.request import TextsAsked
from quire.engine.pooling.worker import PoolingWorker, describe_pooling
from quire.engine.process.link import Link
from quire.engine.process.messages import (
    LinkClosed,
    Message,
    pack_events,
    unpack_ids,
    unpack_params,
)
from quire.engine.process.reports import OpenRequest
from quire.engine.process.worker_loop import IDLE_S, SEND_S, WorkerLoop
from quire.engine.schedule.tiering import Tiering
from quire.engine.schedule.write_barrier import WriteBarrier
from quire.errors import QuireError, RequestError
from quire.gc_control import keep_for_good
from quire.kv.block_log import BlockLog
from quire.request_options import RequestOptions

# How often copies to lower tiers are looked after while finished requests wait for their blocks to
# be written.
BARRIER_S = 0.005


class Worker(WorkerLoop[OpenRequest]):
    def __init__(self, engine: Engine, link: Link, blocks: BlockLog | None = None) -> None:
        """With `blocks`, those its own tiers hold are told along with all else."""
        super().__init__(link)
        self.engine = engine
        self._blocks = blocks
        self.calls |= {
            **views(engine),
            **CacheCalls(engine).named(),
            **AdapterCalls(engine).named(),
            "stats": self.stats,
        }
        self._unwritten: list[tuple[OpenRequest, WriteBarrier]] = []

    def stats(self) -> Message:
        return {**engine_stats(self.engine), "busy_seconds": self.busy_s}

    def _patience(self) -> float:
        return BARRIER_S if self._unwritten else IDLE_S

    def _idle(self) -> None:
        self.engine.scheduler.tiering.poll()

    def _check(self) -> None:
        self.engine.check()

    def _after_turn(self) -> None:
        if self._unwritten:
            self._tell_written()

    def _beside(self) -> Message:
        return {"blocks": pack_events(self._blocks.take())} if self._blocks else {}

    def _add(
        self, number: int, prompt: str, params: Message, options: RequestOptions
    ) -> OpenRequest:
        asked = unpack_params(params)
        if isinstance(asked, TextsAsked):
            raise RequestError(WRITES_TEXT)
        request = self.engine.make_request(str(number), unpack_ids(prompt), asked, options)
        self.engine.submit(request)
        return OpenRequest(number, request, options)

    def _abort(self, number: int) -> None:
        self.engine.abort_request(str(number))

    def _advance(self) -> None:
        started = time.monotonic()
        touched = self.engine.advance()
        if self._queued:
            self._tell_admitted(started)
        for request in touched:
            open_request = self._open.get(int(request.id))
            if open_request is None:
                continue
            if request.finished:
                self._forget(open_request.number)
                tiering = self.engine.scheduler.tiering
                if open_request.wait_for_store and isinstance(tiering, Tiering):
                    self._unwritten.append((open_request, WriteBarrier(tiering.store)))
                    continue
            self._reports.grow(open_request)

    def _tell_written(self) -> None:
        """Report the finished requests whose blocks the tiers have written, or given up."""
        unwritten, self._unwritten = self._unwritten, []
        for open_request, barrier in unwritten:
            if barrier.is_over():
                self._reports.grow(open_request)
            else:
                self._unwritten.append((open_request, barrier))


def describe(engine: Engine) -> Message:
    """What the other process needs to know of the model: its words, and what it can take."""
    tokenizer, namespace = engine.model.tokenizer, engine.observed.namespace
    return {
        "limits": asdict(engine.limits),
        "eos_token_ids": engine.model.eos_token_ids,
        "tokenizer": None if tokenizer is None else tokenizer.to_plain(),
        "namespace": None if namespace is None else asdict(namespace),
        "num_blocks": engine.scheduler.cache.num_blocks,
        "pooling": None,
    }


def main() -> int:
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    with suppress(LinkClosed):
        return _serve(link)
    return 0


def _serve(link: Link) -> int:
    [settings] = _first(link)
    logging.basicConfig(format="%(levelname)s %(message)s", level=settings.pop("log_level"))
    journal, publish_events = settings.pop("journal"), settings.pop("publish_events")
    try:
        engine = _build(settings, publish_events)
    except QuireError as error:
        link.send({"failed": str(error)})
        link.finish(SEND_S)
        return 2
    try:
        if isinstance(engine, PoolingEngine):
            link.send({"ready": describe_pooling(engine)})
            keep_for_good()
            return PoolingWorker(engine, link).run()
        if journal:
            engine.keep_journal()
        blocks = engine.publish_events() if publish_events else None
        link.send({"ready": describe(engine)})
        if engine.model.tokenizer is not None:
            engine.grammars.prepare()  # it holds up steps, so before there are any
        keep_for_good()
        return Worker(engine, link, blocks).run()
    finally:
        engine.close()


def _first(link: Link) -> list[Message]:
    while True:
        if messages := link.receive(None):
            return messages


def _build(settings: Message, publishes_events: bool) -> Engine | PoolingEngine:
    from quire.engine.pooling.build import build_any_engine

    progress = settings.pop("progress")
    config = EngineConfig.create(**settings)
    return build_any_engine(config, progress, publishes_events=publishes_events)
