"""A Mooncake store as a store of values, in calls that can be given up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.kv.tiers.remote.client import Client, ClientError, Value, ValueShape
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.mooncake.channel import Channel
from quire.kv.tiers.remote.mooncake.host import Host
from quire.kv.tiers.remote.pool import Pool

# Codes of the store that mean something here; any other below zero is a failure.
NOT_FOUND = -704
WRONG_SIZE = -600

CHANNELS = 3  # to read, to write and to ask
START_S = 10.0  # for an interpreter and Mooncake's client to start
PATIENCE = 5  # connections in a row that fail until the process is thought to be stuck


class MooncakeClient(Client):
    def __init__(self, setup: dict[str, Any], shape: ValueShape, timeout: float) -> None:
        super().__init__()
        self.connect_seconds = START_S
        self._timeout = timeout
        self._host = Host(setup, shape)
        self._channels: Pool[Channel] = Pool(CHANNELS, self._lost)
        self._failed_connects = 0
        self._closed = False

    def connect(self) -> None:
        try:
            if not self._host.is_running() or self._failed_connects >= PATIENCE:
                self._host.start(Deadline(START_S))
            self._channels.fill(lambda: self._host.open_channel(Deadline(self._timeout)))
            self._failed_connects = 0
        except Exception as error:
            self._failed_connects += 1
            self._channels.turn_away(error)
            raise
        finally:
            if self._closed:  # in the meantime
                self.close()

    def exists(self, keys: Sequence[str], deadline: Deadline) -> list[bool]:
        return [code == 1 for code in self._call("exists", keys, deadline)]

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._call("delete", keys, deadline)

    def fetch(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, int]]:
        places = _places(keys)
        sizes = _sizes(keys, values)
        with self._channels.lend(deadline) as channel:
            codes = self._checked(channel.call("get", list(places), deadline, sizes))
            for i, key in enumerate(keys):
                code = codes[places[key]]
                if code == len(values[i]):
                    channel.take_out(places[key], values[i])
                yield i, 1 if code == WRONG_SIZE else max(code, 0)

    def store(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, str]]:
        places = _places(keys)
        with self._channels.lend(deadline) as channel:
            for i, key in enumerate(keys):
                channel.put_in(places[key], values[i])
            self.count_round_trip()
            codes = channel.call("put", list(places), deadline, _sizes(keys, values))
            for i, key in enumerate(keys):
                code = codes[places[key]]
                yield i, "" if code == 0 else f"the Mooncake store's code is {code}"

    def close(self) -> None:
        self._closed = True
        self._channels.close()
        self._host.end()

    def _call(self, do: str, keys: Sequence[str], deadline: Deadline) -> list[int]:
        with self._channels.lend(deadline) as channel:
            return self._checked(channel.call(do, list(keys), deadline))

    def _checked(self, codes: list[int]) -> list[int]:
        """One key may be in the wrong; if all are, it is the store."""
        self.count_round_trip()
        if all(code < 0 and code not in (NOT_FOUND, WRONG_SIZE) for code in codes):
            raise ClientError(f"the Mooncake store's code is {codes[0]}")
        return codes

    def _lost(self) -> None:
        self.wants_connect()


def _places(keys: Sequence[str]) -> dict[str, int]:
    """Which value in a channel's memory is whose; the store fails when a key comes twice."""
    return {key: place for place, key in enumerate(dict.fromkeys(keys))}


def _sizes(keys: Sequence[str], values: Sequence[Value]) -> list[int]:
    """Bytes of each value in a channel's memory; the same key has the same size."""
    return list({key: len(value) for key, value in zip(keys, values, strict=True)}.values())
