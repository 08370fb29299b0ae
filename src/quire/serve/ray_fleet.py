"""Replicas that Ray keeps: they come and go as it says, and requests go over those there are."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from quire.engine.limits import Limits
from quire.engine.process.messages import Message, unpack_events
from quire.engine.process.request_handle import RequestHandle
from quire.errors import QuireError
from quire.kv.keys import Namespace
from quire.models.text.tokenizer import Tokenizer
from quire.replicas.dispatcher import Dispatcher
from quire.replicas.routers import make_router
from quire.replicas.routing import Router, Sent
from quire.serve import replica_registry
from quire.serve.remote_engine import RemoteEngine

log = logging.getLogger("ray.serve")

BLOCKS_EVERY_S = 0.5  # how often replicas are asked which blocks they hold
ANSWER_S = 30.0


class RayFleet(Dispatcher[RemoteEngine]):
    """Made by `start`.

    While Ray replaces replicas by others with other settings, both kinds are there. Here belong
    those that are like one with the settings given: the same words, the same blocks.
    """

    def __init__(self, deployment: Any, config: Message, router: Router) -> None:
        super().__init__([], router)
        self._deployment = deployment
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._met: dict[str, RemoteEngine] = {}  # by Ray's name, whether or not they belong here
        self._model: Message | None = None  # what those say of themselves that do
        self._is_known = asyncio.Event()

    @classmethod
    async def start(
        cls, deployment: Any, config: Message, routing: str, block_size: int
    ) -> RayFleet:
        """Wait until there is a replica with these settings."""
        fleet = cls(deployment, config, make_router(routing, block_size))
        await deployment.describe.remote(None)  # from now on Ray tells which replicas there are
        replica_registry.watch(str(deployment.deployment_id), fleet._hear)
        await fleet._is_known.wait()
        return fleet

    def _hear(self, targets: frozenset[str]) -> None:
        """In a thread of Ray's."""
        with suppress(RuntimeError):  # the loop has been closed: all is over
            self._loop.call_soon_threadsafe(self._see, targets)

    def _see(self, targets: frozenset[str]) -> None:
        for target in targets - self._met.keys():
            self._meet(target)
        for target in self._met.keys() - targets:
            self._leave(self._met.pop(target))

    def _meet(self, target: str) -> None:
        replica = self._met[target] = RemoteEngine(target, self._deployment, self._lose)
        replica.keeper = asyncio.create_task(self._keep(replica))

    def _lose(self, replica: RemoteEngine, handle: RequestHandle, arrived: bool) -> None:
        """One that cannot be reached gets nothing more, until it answers again."""
        if not arrived and self._is_there(replica):
            self._leave(self._met.pop(replica.target))
            self._meet(replica.target)
        self._take_back(handle, arrived)

    async def _keep(self, replica: RemoteEngine) -> None:
        """Get to know it, let it have work if it belongs here, and learn which blocks it holds."""
        while self._is_there(replica):
            with suppress(QuireError):
                if await self._belongs(await replica.describe()) and self._is_there(replica):
                    self._join(replica)
                    await self._watch(replica)
                return
            await asyncio.sleep(BLOCKS_EVERY_S)

    def _is_there(self, replica: RemoteEngine) -> bool:
        return self._met.get(replica.target) is replica

    async def _belongs(self, told: Message) -> bool:
        """Whether it does, once that is known."""
        model = {name: told[name] for name in ("limits", "tokenizer", "namespace")}
        if self._model is None and told["config"] == self._config:
            self._model = model
            plain = told["tokenizer"]
            self.limits = Limits(**told["limits"])
            self.tokenizer = None if plain is None else Tokenizer.from_plain(plain)
            self.namespace = Namespace(**told["namespace"])
            self._is_known.set()
        await self._is_known.wait()
        return model == self._model

    def _join(self, replica: RemoteEngine) -> None:
        taken = {each.name for each in self.replicas}
        replica.name = next(str(n) for n in range(len(taken) + 1) if str(n) not in taken)
        replica.state = "up"
        self._router.join(replica.name)
        self.replicas.append(replica)
        self.replicas.sort(key=lambda each: int(each.name))
        log.info("Replica %s is up (%s).", replica.name, replica.target)
        self.take_waiting()

    def _leave(self, replica: RemoteEngine) -> None:
        """It has died, or is being stopped: then it ends what it has."""
        if not replica.is_up:
            return
        self._router.leave(replica.name)
        replica.drain()
        log.info("Replica %s gets nothing more (%s).", replica.name, replica.target)

    async def _watch(self, replica: RemoteEngine) -> None:
        """Until it has gone, and no request waits for it."""
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
        known = {*self._met.values(), *self.replicas}
        keepers = [each.keeper for each in known if each.keeper is not None]
        for task in keepers:
            task.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        return 0
