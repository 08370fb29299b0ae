"""Where an adapter comes from: a `LoRARequest`, and the reading of its folder."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import NamedTuple

from quire.engine.adapters.adapter import Adapter
from quire.errors import RequestError
from quire.lora_request import LoRARequest
from quire.runner.plan import AdapterInfo


class Reading(NamedTuple):
    """What became of a reading; a folder with other contents than it had gives both."""

    info: AdapterInfo | None
    error: str | None = None


class AdapterSource:
    """What was read from it stays what it stands for: other contents are an error."""

    def __init__(self, asked: LoRARequest, fingerprint: str) -> None:
        self.asked = asked
        self.fingerprint = fingerprint  # that it must have; "" until the folder was read
        self.adapter: Adapter | None = None  # set, as is the error, when a reading is taken
        self.error: str | None = None
        self.reading: Future[Reading]  # the last one

    @property
    def is_done(self) -> bool:
        """Whether requests can begin with its adapter, or fail."""
        return self.adapter is not None or self.error is not None

    @property
    def has_failed(self) -> bool:
        return self.reading.done() and self.reading.result().error is not None

    def is_for(self, asked: LoRARequest) -> bool:
        """Whether it has the contents that a request expects, as far as both are known."""
        known = {self.fingerprint, asked.fingerprint} - {""}
        return len(known) < 2

    def wait(self, timeout: float | None = None) -> None:
        """Until the folder is read, or the time is over."""
        wait([self.reading], timeout)

    @property
    def is_read(self) -> bool:
        return self.reading.done()

    def check(self) -> None:
        """Raise RequestError if the folder cannot be used; waits until that is known."""
        if (error := self.reading.result().error) is not None:
            raise RequestError(error)
