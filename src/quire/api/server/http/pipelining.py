"""Requests that come on one connection before the one in front of them is answered.

uvicorn keeps them in a queue, and stops reading until they have had their turn. So it does not
notice when the client leaves meanwhile, and when it does it tells the newest request alone: the one
that is being answered would be computed to its end, and its answer written to a closed socket.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_QUEUED = 16  # requests; behind them nothing is read until one has been answered


class PipelinedConnection(HttpToolsProtocol):
    """uvicorn's connection, which tells all its requests when the client has left."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._open: list[RequestResponseCycle] = []

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            others = [each for each in self._open if each is not self.cycle]
            self._open = [*(each for each in others if not each.response_complete), self.cycle]
        if 0 < len(self.pipeline) <= MOST_QUEUED:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.abandon()
        super().connection_lost(exc)

    def abandon(self) -> None:
        """The client has left: its open requests are told, queued ones do not begin."""
        self.pipeline.clear()
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
