"""Requests that wait for their grammars and adapters before they join the queue."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from quire.engine.adapters.catalog import AdapterCatalog
from quire.engine.endings import fail_request
from quire.engine.grammar.grammar import Grammar
from quire.engine.grammar.state import GrammarState
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Request, Status


class Awaited(Protocol):
    """A grammar that is being compiled, or an adapter that is being read."""

    @property
    def is_done(self) -> bool: ...

    @property
    def error(self) -> str | None:
        """Why it cannot be used, when it is done."""

    def wait(self, timeout: float | None = None) -> None: ...


class Preparing:
    """In order of arrival."""

    def __init__(
        self,
        scheduler: Scheduler,
        adapters: AdapterCatalog | None,
        abandon: Callable[[Grammar], None],
    ) -> None:
        """`abandon` is told of grammars that a request waits for no longer."""
        self._scheduler = scheduler
        self._adapters = adapters
        self._abandon = abandon
        self._waiting: dict[Request, list[Awaited]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Let it join the queue when it has all it waits for."""
        asked: tuple[Awaited | None, ...] = (request.grammar, request.lora)
        awaited = [each for each in asked if each is not None]
        if awaited:
            request.sequences[0].status = Status.PREPARING
            self._waiting[request] = awaited
        else:
            self._scheduler.add(request.sequences[0])

    def drop(self, request: Request) -> None:
        """The request is aborted, or fails."""
        if self._waiting.pop(request, None) is not None and request.grammar is not None:
            self._abandon(request.grammar)

    def take_done(self, requests: Collection[Request]) -> list[Request]:
        """Let those begin that have all they waited for; returns those that have failed.

        `requests` are all that there are: where an adapter cannot be read again, those that have
        begun without it fail, too.
        """
        failed = [] if self._adapters is None else self._take_read(self._adapters, requests)
        for request, awaited in list(self._waiting.items()):
            errors = [each.error for each in awaited if each.is_done]
            if (error := next(filter(None, errors), None)) is not None:
                self.drop(request)
                fail_request(self._scheduler, request, error, is_at_fault=True)
                failed.append(request)
            elif len(errors) == len(awaited):
                del self._waiting[request]
                self._begin(request)
        return failed

    def _begin(self, request: Request) -> None:
        first = request.sequences[0]
        if request.grammar is not None:
            first.grammar = GrammarState(request.grammar)
        if self._adapters is not None and request.lora is not None:
            self._adapters.attach(request)
        first.status = Status.WAITING
        self._scheduler.add(first)

    def _take_read(self, adapters: AdapterCatalog, requests: Collection[Request]) -> list[Request]:
        """Take the adapters that were read; requests whose adapter is lost fail."""
        if not adapters.is_reading:
            return []
        unusable = adapters.take_read(self._scheduler.queues.adapters_in_use())
        if not unusable:
            return []
        lost = [
            request
            for request in requests
            if request.lora in unusable and request.adapter and not request.adapter.is_in_host
        ]
        for request in lost:
            assert request.lora is not None and request.lora.error is not None
            fail_request(self._scheduler, request, request.lora.error, is_at_fault=True)
        return lost

    def wait(self, timeout: float) -> None:
        """Nothing can be computed now: wait until something is prepared, or the time is over."""
        for each in next(iter(self._waiting.values()), ()):
            if not each.is_done:
                each.wait(timeout)
                return
        if self._adapters is not None:
            self._adapters.wait(timeout)
