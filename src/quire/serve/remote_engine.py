"""An engine that is an actor of Ray's, as the server's process sees it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quire.engine.process.client import DIED
from quire.engine.process.engine_link import EngineLink
from quire.engine.process.messages import Message, PackedRequest
from quire.engine.process.request_handle import EngineDied, RequestHandle
from quire.errors import QuireError
from quire.replicas.handover import BOTH
from quire.replicas.routing import Sent
from quire.serve.relay import deliver

log = logging.getLogger("ray.serve")

T = TypeVar("T")


class RemoteEngine(EngineLink):
    """`state` is "new", "up", "draining" (it only ends what it has) or "down"."""

    def __init__(
        self,
        target: str,
        deployment: Any,
        on_lost: Callable[[RemoteEngine, RequestHandle, bool], None],
    ) -> None:
        """`on_lost` is told of each request that it will not end, and whether it had arrived."""
        super().__init__()  # it has a name once it is up
        self.target = target  # Ray's name for it
        self.state = "new"
        self.role = BOTH
        self.load = 0.0
        self.ended: list[Sent] = []  # requests whose blocks it has not told of yet
        self.keeper: asyncio.Task[None] | None = None
        self._deployment = deployment
        self._on_lost = on_lost
        self._unacknowledged: set[int] = set()  # requests that may not have arrived there
        self._followers: dict[int, asyncio.Task[None]] = {}

    @property
    def client(self) -> RemoteEngine:
        return self

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    @property
    def is_alive(self) -> bool:
        return self.state != "down"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "role": self.role,
            "load": self.load,
            "open": self.num_open,
            "waiting": self.num_waiting,
            "starts": 1,
        }

    # --- requests -----------------------------------------------------------------------------

    def _send_request(self, handle: RequestHandle, request: PackedRequest) -> None:
        self._unacknowledged.add(handle.number)
        self._followers[handle.number] = _apart(self._follow(handle, request))

    def _abort(self, handle: RequestHandle) -> None:
        self._followers[handle.number].cancel()

    async def _follow(self, handle: RequestHandle, request: PackedRequest) -> None:
        response = self._deployment.options(stream=True).follow.remote(self.target, request)
        try:
            async for relayed in response:
                self._unacknowledged.discard(handle.number)
                deliver(handle, relayed)
                self._updated(handle)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:  # Ray's, or the engine's: whatever it is, no more will come
            log.warning("Replica %s lost a request: %s", self.name, _first_line(error))
        self._lose(handle)

    def drain(self) -> None:
        """It gets nothing new. What may not have reached it goes elsewhere."""
        self.state = "draining"
        for number in list(self._unacknowledged):
            handle = self._open[number]
            self._abort(handle)
            self._lose(handle)

    def _lose(self, handle: RequestHandle) -> None:
        arrived = handle.number not in self._unacknowledged
        if not handle.finished and self._forget(handle):
            self._on_lost(self, handle, arrived)

    def _forget(self, handle: RequestHandle) -> bool:
        self._unacknowledged.discard(handle.number)
        self._followers.pop(handle.number, None)
        return super()._forget(handle)

    # --- questions ----------------------------------------------------------------------------

    async def call(self, name: str, **args: Any) -> Any:
        return await _apart(self._ask("ask", name, args))

    async def describe(self) -> Message:
        told: Message = await _apart(self._ask("describe"))
        return told

    async def blocks(self, since: int) -> tuple[int, Message]:
        position, events = await _apart(self._ask("blocks", since))
        return position, events

    async def _ask(self, method: str, *args: Any) -> Any:
        response = getattr(self._deployment, method).remote(self.target, *args)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            cause = getattr(error, "cause", error)
            raise cause if isinstance(cause, QuireError) else EngineDied(DIED) from None


def _apart(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """In no request's context: Ray takes all calls of one request for the same one."""
    return contextvars.Context().run(asyncio.create_task, call)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
