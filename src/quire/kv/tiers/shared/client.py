"""An engine's connections to the cache's server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from quire.kv.tiers.remote.client import Connector
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.pool import Pool
from quire.kv.tiers.shared.channel import Channel
from quire.kv.tiers.shared.protocol import Shape

CHANNELS = 4  # a store's threads: two read, one writes, one asks


class SharedClient(Connector):
    def __init__(self, path: Path, shape: Shape, timeout: float) -> None:
        super().__init__()
        self.connect_seconds = timeout
        self._path, self._shape, self._timeout = path, shape, timeout
        self._greeting: Channel | None = None  # that is being opened
        self._closed = False
        self._channels: Pool[Channel] = Pool(CHANNELS, lambda: self.wants_connect())

    def connect(self) -> None:
        try:
            self._channels.fill(self._open)
        except Exception as error:
            self._channels.turn_away(error)
            raise

    def lend(self, deadline: Deadline) -> AbstractContextManager[Channel]:
        """A connection for one call."""
        self.count_round_trip()
        return self._channels.lend(deadline)

    def close(self) -> None:
        self._closed = True
        if (greeting := self._greeting) is not None:
            greeting.hang_up()
        self._channels.close()

    def _open(self) -> Channel:
        channel = self._greeting = Channel()
        try:
            if self._closed:
                channel.close()
                raise ConnectionError("the cache is closed")
            return channel.open(self._path, self._shape, Deadline(self._timeout))
        finally:
            self._greeting = None
