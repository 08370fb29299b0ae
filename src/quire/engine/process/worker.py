"""The engine's process: reads what it is told, steps, and says what is new.

    while not told to stop:   commands that have come  ─►  one step  ─►  one message of updates

It waits for commands only while it has nothing to compute. When the other process is gone, or says
so, everything ends in order: what is on its way to a lower tier is written first.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.observe.adapter_calls import AdapterCalls
from quire.engine.observe.cache_control import CacheCalls
from quire.engine.observe.introspection import engine_stats, views
from quire.engine.process.link import Link
from quire.engine.process.messages import (
    LinkClosed,
    Message,
    pack_events,
    unpack_ids,
    unpack_options,
    unpack_params,
)
from quire.engine.process.reports import OpenRequest, Reports
from quire.engine.schedule.tiering import Tiering
from quire.engine.schedule.write_barrier import WriteBarrier
from quire.errors import EngineFailed, QuireError, RequestError, in_one_sentence
from quire.gc_control import keep_for_good
from quire.kv.block_log import BlockLog

log = logging.getLogger("quire")

IDLE_S = 1.0  # how often copies to lower tiers are looked after while nothing is computed
BARRIER_S = 0.005  # and while finished requests wait for their blocks to be written
SEND_S = 5.0
MOST_FAILURES = 3  # steps in a row that raise before the engine is given up

Call = Callable[..., Any]


class Worker:
    def __init__(self, engine: Engine, link: Link, blocks: BlockLog | None = None) -> None:
        """With `blocks`, those its own tiers hold are told along with all else."""
        self.engine = engine
        self._blocks = blocks
        self.calls: dict[str, Call] = {
            **views(engine),
            **CacheCalls(engine).named(),
            **AdapterCalls(engine).named(),
            "stats": self.stats,
            "ping": lambda: None,
        }
        self.busy_s = 0.0  # time spent on steps and on what is told before and after each
        self._link = link
        self._reports = Reports()
        self._open: dict[int, OpenRequest] = {}
        self._queued: dict[int, OpenRequest] = {}  # those that were never admitted
        self._unwritten: list[tuple[OpenRequest, WriteBarrier]] = []
        self._stopping = False
        self._num_failures = 0

    def run(self) -> int:
        """Until told to stop, or the other process is gone; the status to exit with."""
        try:
            while not self._stopping:
                self._turn()
        except LinkClosed:
            log.info("The server is gone; the engine ends.")
        except EngineFailed as error:
            log.error("%s", error)
            self._fail_all(error)
            self._link.finish(SEND_S)
            self._report()
            self._link.finish(SEND_S)
            return 1
        return 0

    def _turn(self) -> None:
        started, busy = time.perf_counter(), bool(self._open)
        self._obey(self._link.receive(0.0 if busy else BARRIER_S if self._unwritten else IDLE_S))
        self.engine.check()
        if self._open:
            self._step()
        else:
            self.engine.scheduler.tiering.poll()
        if self._unwritten:
            self._tell_written()
        self._report()
        if busy:
            self.busy_s += time.perf_counter() - started

    def stats(self) -> Message:
        return {**engine_stats(self.engine), "busy_seconds": self.busy_s}

    # --- commands -----------------------------------------------------------------------------

    def _obey(self, commands: list[Message]) -> None:
        for command in commands:
            do = command.pop("do")
            getattr(self, f"_do_{do}")(**command)

    def _do_add(self, number: int, prompt: str, params: Message, options: Message) -> None:
        asked = unpack_options(options)
        try:
            request = self.engine.make_request(
                str(number), unpack_ids(prompt), unpack_params(params), asked
            )
            self.engine.submit(request)
        except RequestError as error:
            self._reports.fail(number, str(error), "request")
            return
        self._open[number] = self._queued[number] = OpenRequest(number, request, asked)

    def _do_abort(self, number: int) -> None:
        if self._forget(number) is not None:
            self.engine.abort_request(str(number))

    def _do_call(self, number: int, name: str, args: Message) -> None:
        if name not in self.calls:
            self._reports.answer(number, error=f"The engine has no call {name!r}.")
            return
        try:
            self._reports.answer(number, value=self.calls[name](**args))
        except QuireError as error:
            self._reports.answer(number, error=str(error))
        except Exception as error:
            log.exception("The call %s failed.", name)
            self._reports.answer(number, error=in_one_sentence(error))

    def _do_stop(self) -> None:
        self._stopping = True

    # --- steps --------------------------------------------------------------------------------

    def _step(self) -> None:
        started = time.monotonic()
        try:
            touched = self.engine.advance()
        except EngineFailed:
            raise
        except Exception as error:
            self._give_up(error)
            return
        self._num_failures = 0
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

    def _tell_admitted(self, now: float) -> None:
        """`now` is when the step was planned that admitted them, or did not."""
        for open_request in list(self._queued.values()):
            if open_request.request.num_cached_tokens is not None:
                del self._queued[open_request.number]
                self._reports.admit(open_request, now)
            elif open_request.deadline is not None and now > open_request.deadline:
                waited = now - open_request.arrived
                self._do_abort(open_request.number)
                says = f"The request waited {waited:.0f} s for its turn; try again later."
                self._reports.fail(open_request.number, says, "queue")

    def _tell_written(self) -> None:
        """Report the finished requests whose blocks the tiers have written, or given up."""
        unwritten, self._unwritten = self._unwritten, []
        for open_request, barrier in unwritten:
            if barrier.is_over():
                self._reports.grow(open_request)
            else:
                self._unwritten.append((open_request, barrier))

    def _forget(self, number: int) -> OpenRequest | None:
        self._queued.pop(number, None)
        return self._open.pop(number, None)

    def _give_up(self, error: Exception) -> None:
        """A step raised, which the engine's own recovery should have met: end what is open."""
        log.exception("A step of the engine failed.")
        self._num_failures += 1
        self._fail_all(error)
        if self._num_failures >= MOST_FAILURES:
            raise error

    def _fail_all(self, error: Exception) -> None:
        for number in list(self._open):
            self._do_abort(number)
            self._reports.fail(number, in_one_sentence(error), "engine")

    def _report(self) -> None:
        if not self._link.is_free or not (self._reports or self._blocks):
            return
        message = self._reports.take()
        if self._blocks:
            message["blocks"] = pack_events(self._blocks.take())
        self._link.send(message)


def describe(engine: Engine) -> Message:
    """What the other process needs to know of the model: its words, and what it can take."""
    tokenizer, namespace = engine.model.tokenizer, engine.observed.namespace
    return {
        "limits": asdict(engine.limits),
        "eos_token_ids": engine.model.eos_token_ids,
        "tokenizer": None if tokenizer is None else tokenizer.to_plain(),
        "namespace": None if namespace is None else asdict(namespace),
        "num_blocks": engine.scheduler.cache.num_blocks,
    }


def main() -> None:
    # A terminal's Ctrl-C and a service manager's SIGTERM reach this process too. When to end is
    # the server's to say: it answers open requests first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    with suppress(LinkClosed):
        sys.exit(_serve(link))


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


def _build(settings: Message, publishes_events: bool) -> Engine:
    from quire.engine.build import build_engine

    progress = settings.pop("progress")
    config = EngineConfig.create(**settings)
    return build_engine(config, progress, publishes_events=publishes_events)


if __name__ == "__main__":
    main()
