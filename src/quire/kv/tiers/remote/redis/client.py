"""A Redis server, or a cluster of them, as a store of values.

Whether a value is there is asked by `STRLEN`: one of another length is none. To the server it is a
use of the value, as `GET` is, so its eviction spares what requests ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from quire.kv.tiers.remote.client import Client, ClientError, Value, ValueShape
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.redis.connect import Dialler
from quire.kv.tiers.remote.redis.link import (
    Refusal,
    Reply,
    key_commands,
    set_command,
)
from quire.kv.tiers.remote.redis.servers import Cluster, Servers

WINDOW_BYTES = 8 << 20  # of values asked for ahead: enough for a network, little for a server


class RedisClient(Client):
    """`settings` are redis-py's; `ttl` is for how many seconds values are kept, if not for ever."""

    def __init__(
        self,
        settings: dict[str, Any],
        is_cluster: bool,
        shape: ValueShape,
        timeout: float,
        ttl: float | None,
    ) -> None:
        super().__init__()
        self.connect_seconds = timeout
        self._shape, self._ttl = shape, ttl
        self._window = max(2, WINDOW_BYTES // shape.value_bytes)
        dialler = Dialler(settings, timeout)
        self._servers = (
            Cluster(dialler, self._lost, timeout) if is_cluster else Servers(dialler, self._lost)
        )

    def connect(self) -> None:
        self._servers.connect()

    def exists(self, keys: Sequence[str], deadline: Deadline) -> list[bool]:
        replies = self._ask(key_commands("STRLEN", keys), keys, deadline)
        if not self._shape.others:
            return [reply == self._shape.value_bytes for reply in replies]
        return [self._shape.is_length(reply) for reply in replies]

    def fetch(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, int]]:
        """Some values are asked for ahead, so that the server copies one while another travels."""
        half = self._window // 2
        for pool, indices in self._servers.split(keys):
            self.count_round_trip()
            gets = key_commands("GET", (keys[i] for i in indices))
            with pool.lend(deadline) as link:
                link.send(gets[: self._window], deadline)
                for at, i in enumerate(indices):
                    if at and at % half == 0:  # so many have come
                        start = at + self._window - half
                        link.send(gets[start : start + half], deadline)
                    found = link.value(values[i], deadline)
                    yield i, self._size(found)
                    if isinstance(found, int) and found not in (0, len(values[i])):
                        link.skip(found, deadline)

    def store(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, str]]:
        for pool, indices in self._servers.split(keys):
            self.count_round_trip()
            with pool.lend(deadline) as link:
                sets = (set_command(keys[i], values[i], self._ttl) for i in indices)
                link.send(chain.from_iterable(sets), deadline)
                for i in indices:
                    reply = self._heed(link.reply(deadline))
                    yield i, "" if reply == b"OK" else str(reply)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._ask(key_commands("UNLINK", keys), keys, deadline)

    def close(self) -> None:
        self._servers.close()

    def _ask(
        self, commands: Sequence[bytes], keys: Sequence[str], deadline: Deadline
    ) -> list[Reply]:
        """One command for each key, all of them sent before the first reply is read."""
        self.count_round_trip()
        replies: list[Reply] = [None] * len(keys)
        with ExitStack() as links:
            asked = []
            for pool, indices in self._servers.split(keys):
                link = links.enter_context(pool.lend(deadline))
                link.send((commands[i] for i in indices), deadline)
                asked.append((link, indices))
            for link, indices in asked:
                for i, reply in zip(indices, link.replies(len(indices), deadline), strict=True):
                    replies[i] = self._heed(reply)
        if all(isinstance(reply, Refusal) and not reply.is_about_the_key for reply in replies):
            raise ClientError(str(replies[0]))
        return replies

    def _size(self, found: int | Refusal) -> int:
        if isinstance(found, int):
            return found
        self._heed(found)
        if not found.is_about_the_key:
            raise found
        return 0 if found.has_moved else 1  # what is there is not what it should be

    def _heed(self, reply: Reply) -> Reply:
        if isinstance(reply, Refusal) and reply.has_moved:
            self._servers.moved()
        return reply

    def _lost(self) -> None:
        self.wants_connect()
