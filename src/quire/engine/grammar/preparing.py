"""Requests that wait for their grammars before they join the queue."""

from __future__ import annotations

from quire.engine.grammar.compiler import Grammar
from quire.engine.sequence import Request, Status


class Preparing:
    """In order of arrival. Those that are aborted meanwhile are forgotten when they are done."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Request, Grammar]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request, grammar: Grammar) -> None:
        request.sequences[0].status = Status.PREPARING
        self._waiting.append((request, grammar))

    def take_done(self) -> list[tuple[Request, Grammar]]:
        """Those whose grammars are compiled, or cannot be."""
        done = [each for each in self._waiting if each[1].is_done]
        self._waiting = [each for each in self._waiting if each not in done]
        return [each for each in done if not each[0].finished]

    def wait(self, timeout: float) -> None:
        """Until the first is done, or the time is over."""
        self._waiting[0][1].wait(timeout)
