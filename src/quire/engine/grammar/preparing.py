"""Requests that wait for their grammars before they join the queue."""

from __future__ import annotations

from quire.engine.grammar.grammar import Grammar
from quire.engine.sequence import Request, Status


class Preparing:
    """In order of arrival."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Request, Grammar]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, grammar: Grammar) -> None:
        request.sequences[0].status = Status.PREPARING
        self._waiting.append((request, grammar))

    def drop(self, request: Request) -> Grammar | None:
        """The request is aborted; returns the grammar that it does not wait for any more."""
        found = [grammar for each, grammar in self._waiting if each is request]
        self._waiting = [each for each in self._waiting if each[0] is not request]
        return found[0] if found else None

    def take_done(self) -> list[tuple[Request, Grammar]]:
        """Those whose grammars are compiled, or cannot be."""
        done = [each for each in self._waiting if each[1].is_done]
        self._waiting = [each for each in self._waiting if each not in done]
        return done

    def wait(self, timeout: float) -> None:
        """Until the first is done, or the time is over."""
        self._waiting[0][1].wait(timeout)
