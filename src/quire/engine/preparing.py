"""Requests that wait for their grammars and adapters before they join the queue."""

from __future__ import annotations

from typing import Protocol

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

    def __init__(self) -> None:
        self._waiting: dict[Request, list[Awaited]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        request.sequences[0].status = Status.PREPARING
        self._waiting[request] = [each for each in (request.grammar, request.lora) if each]

    def drop(self, request: Request) -> bool:
        """The request is aborted; returns whether it was waiting here."""
        return self._waiting.pop(request, None) is not None

    def take_done(self) -> list[tuple[Request, str | None]]:
        """Requests that can begin, or cannot, and why."""
        done = []
        for request, awaited in list(self._waiting.items()):
            errors = [each.error for each in awaited if each.is_done]
            error = next(filter(None, errors), None)
            if error is not None or len(errors) == len(awaited):
                del self._waiting[request]
                done.append((request, error))
        return done

    def wait(self, timeout: float) -> None:
        """Until something that the first waits for is done, or the time is over."""
        for each in next(iter(self._waiting.values())):
            if not each.is_done:
                each.wait(timeout)
                return
