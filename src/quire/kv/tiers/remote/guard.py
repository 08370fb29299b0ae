"""Calls to a store that may be slow or gone: bounded, counted, and after a few failures not made.

One thread, the keeper, makes all connections and does all probing; else it sleeps. So an outage
costs requests no more than its first failures, and the store is found again without any request.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from quire.kv.tiers.remote.breaker import Breaker, State
from quire.kv.tiers.remote.client import ClientError, Connector
from quire.kv.tiers.remote.deadline import Deadline

log = logging.getLogger("quire")

_FIRST_S = 3.0  # a start waits for the store's first answer, so that the first requests find it
_JOIN_S = 2.0  # a keeper that looks up a name cannot be hurried; it is left to end by itself


class Guard:
    """Stands before a client. `hide` takes secrets out of a text; `address` has none."""

    def __init__(
        self, client: Connector, address: str, hide: Callable[[str], str], breaker: Breaker
    ) -> None:
        self._client, self._address, self._hide, self._breaker = client, address, hide, breaker
        self._failures: Counter[str] = Counter()
        self._last_error = self._last_refusal = ""
        self._lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._tried = threading.Event()
        client.wants_connect = self._wake.set
        self._keeper = threading.Thread(target=self._keep, name="quire-remote-keeper", daemon=True)
        self._keeper.start()
        self._tried.wait(min(client.connect_seconds, _FIRST_S))

    def run(self, kind: str, work: Callable[[Deadline], None], seconds: float) -> str | None:
        """Do `work` by a deadline; None, or in a word why it was not done to its end."""
        if self._closing.is_set() or self._breaker.state is not State.CLOSED:
            return "open"
        try:
            work(Deadline(seconds))
        except (OSError, ClientError) as error:
            reason = self._note(error)
            if self._breaker.failed(kind):
                self._say_it_is_gone()
            self._wake.set()
            return reason
        self._breaker.succeeded(kind)
        return None

    def note_refusal(self, text: str) -> None:
        """The store works, but does not take what it is given: that it is full, for instance."""
        self._last_refusal = self._hide(text)

    def explain(self, failure: str) -> str:
        """In a few words, what `run` says in one."""
        if failure == "refused":
            return self._last_refusal or "the store is full"
        if failure == "timeout":
            return "the store did not answer in time"
        says = "the store is away" if failure == "open" else "the store failed"
        return f"{says} ({self._last_error})" if self._last_error else says

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "address": self._address,
                "breaker": self._breaker.state.value,
                "breaker_opened": self._breaker.times_opened,
                "retry_in_seconds": self._breaker.seconds_to_probe(),
                "timeouts": self._failures["timeout"],
                "errors": self._failures["error"],
                "last_error": self._last_error,
                "last_refusal": self._last_refusal,
                "round_trips": self._client.round_trips,
            }

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._client.close()
        self._keeper.join(_JOIN_S)

    def _keep(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            if self._breaker.state is State.CLOSED:
                self._mend()
            elif self._breaker.start_probe():
                self._probe()
            self._tried.set()
            self._wake.wait(self._breaker.seconds_to_probe())

    def _mend(self) -> None:
        """Something went missing while the store was thought to be there."""
        if not self._connects() and self._breaker.trip():
            self._say_it_is_gone()

    def _probe(self) -> None:
        found = self._connects()
        self._breaker.end_probe(found)
        if found:
            log.info("The remote cache %s answers.", self._address)
        elif not self._tried.is_set():
            self._say_it_is_gone()

    def _connects(self) -> bool:
        try:
            self._client.connect()
        except Exception as error:  # whatever the store's own library raises
            if not self._closing.is_set():
                self._note(error)
            return False
        return True

    def _note(self, error: Exception) -> str:
        reason = "timeout" if isinstance(error, TimeoutError) else "error"
        with self._lock:
            self._failures[reason] += 1
            self._last_error = self._hide(f"{type(error).__name__}: {error}")
        return reason

    def _say_it_is_gone(self) -> None:
        if not self._closing.is_set():
            says = (
                "The remote cache %s does not serve (%s); Quire goes on without it and asks again."
            )
            log.warning(says, self._address, self._last_error)
