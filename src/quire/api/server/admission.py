"""Whether another request may wait for its turn."""

from __future__ import annotations

import math
from collections import Counter

from quire.api.server.errors import ApiError
from quire.api.server.settings import ServerConfig
from quire.engine.process.service import Service

LONGEST_ADVICE_S = 60


class Admission:
    def __init__(self, settings: ServerConfig, client: Service) -> None:
        self._settings = settings
        self._client = client
        self.draining = False
        self.refused = Counter(shutting_down=0, queue_full=0)  # since the start, for metrics
        self.recent_wait_s = 1.0  # what a client that is refused is told to wait

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Raise a 503 while the server shuts down, a 429 while the queue is full.

        An empty queue takes anything: what one client may send is bounded elsewhere.
        """
        if self.draining:
            self.refused["shutting_down"] += 1
            raise ApiError(
                503,
                "The server is shutting down; send the request to another one.",
                code="shutting_down",
                headers={"Retry-After": "1"},
            )
        settings, client = self._settings, self._client
        if client.num_waiting == 0:
            return
        if client.num_waiting + num_requests > settings.max_queued_requests:
            self._refuse(f"{client.num_waiting:,} requests are waiting already")
        if client.num_waiting_tokens + num_tokens > settings.max_queued_tokens:
            self._refuse(f"{client.num_waiting_tokens:,} prompt tokens are waiting already")

    def note_wait(self, seconds: float) -> None:
        """Remember how long a request has waited, as the estimate for the next one."""
        self.recent_wait_s += 0.1 * (seconds - self.recent_wait_s)

    def _refuse(self, why: str) -> None:
        self.refused["queue_full"] += 1
        advice = min(LONGEST_ADVICE_S, max(1, math.ceil(self.recent_wait_s)))
        raise ApiError(
            429,
            f"The server is busy ({why}); try again in {advice} s.",
            code="queue_full",
            headers={"Retry-After": str(advice)},
        )
