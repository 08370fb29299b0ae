"""Replicas that Ray keeps: they come and go as it says, and requests go over those there are."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from quire.engine.limits import Limits
from quire.engine.process.messages import unpack_events
from quire.errors import QuireError
from quire.kv.keys import Namespace
from quire.models.tokenizer import Tokenizer
from quire.replicas.dispatcher import Dispatcher
from quire.replicas.routers import make_router
from quire.replicas.routing import Router, Sent
from quire.serve import roster
from quire.serve.remote_engine import RemoteEngine

log = logging.getLogger("ray.serve")

BLOCKS_EVERY_S = 0.5  # how often replicas are asked which blocks they hold
ANSWER_S = 30.0


class RayFleet(Dispatcher[RemoteEngine]):
    """Made by `start`."""

    def __init__(self, handle: Any, router: Router) -> None:
        super().__init__([], router)
        self._handle = handle
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def start(cls, handle: Any, routing: str, block_size: int) -> RayFleet:
        """Wait until there is a replica."""
        fleet = cls(handle, make_router(routing, block_size))
        told = await handle.describe.remote(None)
        plain = told["tokenizer"]
        fleet.limits = Limits(**told["limits"])
        fleet.tokenizer = None if plain is None else Tokenizer.from_plain(plain)
        fleet.namespace = Namespace(**told["namespace"])
        roster.watch(str(handle.deployment_id), fleet._hear)
        return fleet

    def _hear(self, targets: frozenset[str]) -> None:
        """In a thread of Ray's."""
        with suppress(RuntimeError):  # the loop has been closed: all is over
            self._loop.call_soon_threadsafe(self._see, targets)

    def _see(self, targets: frozenset[str]) -> None:
        known = {replica.target for replica in self.replicas if replica.is_up}
        for target in sorted(targets - known):
            self._join(target)
        for replica in list(self.replicas):
            if replica.is_up and replica.target not in targets:
                self._leave(replica)
        self.take_waiting()

    def _join(self, target: str) -> None:
        taken = {replica.name for replica in self.replicas}
        name = next(str(n) for n in range(len(taken) + 1) if str(n) not in taken)
        replica = RemoteEngine(name, target, self._handle, self._take_back)
        self._router.join(name)
        self.replicas.append(replica)
        self.replicas.sort(key=lambda each: int(each.name))
        replica.watching = asyncio.create_task(self._watch(replica))
        log.info("Replica %s is up (%s).", name, target)

    def _leave(self, replica: RemoteEngine) -> None:
        """It has died, or is being stopped: then it ends what it has."""
        self._router.leave(replica.name)
        replica.drain()
        log.info("Replica %s gets nothing more (%s).", replica.name, replica.target)

    async def _watch(self, replica: RemoteEngine) -> None:
        """Learn which blocks it holds, until it has gone and nobody waits for it."""
        position = 0
        while replica.is_up or replica.num_open:
            if replica.is_up:
                ended, replica.ended = replica.ended, []
                with suppress(QuireError, asyncio.TimeoutError):
                    asked = replica.blocks(position)
                    position, events = await asyncio.wait_for(asked, ANSWER_S)
                    self._router.apply(replica.name, unpack_events(events))
                for sent in ended:
                    self._router.end(sent)
            await asyncio.sleep(BLOCKS_EVERY_S)
        replica.state = "down"
        self.replicas.remove(replica)

    def _end(self, sent: Sent, replica: RemoteEngine) -> None:
        """Its blocks are expected there until the replica has told of them itself."""
        replica.ended.append(sent)

    async def stop(self) -> int | None:
        watching = [each.watching for each in self.replicas if each.watching is not None]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        return 0
