"""One engine as an actor that Ray starts, watches, scales and stops."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from quire.config import EngineConfig
from quire.engine.process.client import DIED, EngineClient
from quire.engine.process.messages import Message, PackedRequest, unpack_ids
from quire.replicas.machine import replica_config
from quire.serve.block_feed import BlockFeed
from quire.serve.relay import Relay, RelayedUpdates

log = logging.getLogger("ray.serve")


class EngineActor:
    """The first argument of a call is the replica that it is for; `TargetRouter` sends it there.

    Ray awaits `__init__` and `__del__`.
    """

    async def __init__(self, config: Message, journal: bool) -> None:  # type: ignore[misc]
        rank = serve.get_replica_context().rank.rank
        self._config = config
        self._numbers = itertools.count(1)
        self._blocks = BlockFeed()
        self._is_stopping = False
        self._client = await EngineClient.start(
            replica_config(EngineConfig.create(**config), rank, 1, 0),
            journal=journal,
            numbers=self._numbers,
            on_blocks=self._blocks.apply,
        )
        self._ending = asyncio.create_task(self._end_with_the_engine())

    async def follow(
        self, target: str | None, request: PackedRequest
    ) -> AsyncIterator[RelayedUpdates]:
        """Compute a request, and pass on what is new of it; first, that it has arrived."""
        relay = Relay(next(self._numbers), len(unpack_ids(request["prompt"])))
        self._client.place(relay, request)
        try:
            yield time.monotonic(), []
            while not relay.is_done:
                yield await relay.relayed()
        finally:
            self._client.close(relay)

    async def ask(self, target: str | None, name: str, args: Message) -> Any:
        """One of the engine's named calls."""
        return await self._client.call(name, **args)

    async def blocks(self, target: str | None, since: int) -> tuple[int, Message]:
        """What has changed since a position, and the position now."""
        return self._blocks.since(since)

    async def describe(self, target: str | None) -> Message:
        """Its settings, the model's words, and what it can take."""
        return {**self._client.description, "config": self._config}

    async def check_health(self) -> None:
        """An engine that hangs does not answer, and Ray gives it up after a while."""
        await self._client.call("ping")

    async def _end_with_the_engine(self) -> None:
        """So that Ray sees at once that there is nothing left here, and starts another."""
        await self._client.died.wait()
        if not self._is_stopping:
            log.error(DIED)
            os._exit(1)

    async def __del__(self) -> None:
        """Ray's last call: what is on its way to lower tiers is written."""
        self._is_stopping = True
        if hasattr(self, "_client"):  # it may not have come so far
            await self._client.stop()
